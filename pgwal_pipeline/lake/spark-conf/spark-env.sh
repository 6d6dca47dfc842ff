# Read by Spark's launcher (bash). Spark never speaks to the source: what the source's password may stand in does not reach its processes.
unset PGWAL_SOURCE_DSN PGPASSWORD
