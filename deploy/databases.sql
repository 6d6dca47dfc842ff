-- Beside the source's database, one for Dagster's own events, with a user of its own that may use no other. Run by psql once, when the
-- server's data is made.
\set password `cat /run/pgwal/dagster`
CREATE ROLE dagster LOGIN PASSWORD :'password';
CREATE DATABASE dagster OWNER dagster;
REVOKE CONNECT ON DATABASE source, postgres FROM PUBLIC;
