from pgwal_pipeline.components.cdc import PostgresCdcComponent

__all__ = ["PostgresCdcComponent"]
