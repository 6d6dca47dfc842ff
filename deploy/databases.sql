-- Beside the source's database, one for Dagster's own events. Run once, when the server's data is made.
CREATE DATABASE dagster;
