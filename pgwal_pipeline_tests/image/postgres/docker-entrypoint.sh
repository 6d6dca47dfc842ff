#!/bin/bash
# What the official image's entry point does, as far as it is used here: makes the data folder, the password, the database, runs *.sql once.
set -eu
if [ "$(id -u)" = 0 ]; then
  [ -z "${POSTGRES_PASSWORD_FILE:-}" ] || POSTGRES_PASSWORD="$(cat "$POSTGRES_PASSWORD_FILE")"
  export POSTGRES_PASSWORD="${POSTGRES_PASSWORD:-}"
  unset POSTGRES_PASSWORD_FILE
  mkdir -p "$PGDATA" /var/run/postgresql
  chown -R 999:999 "$PGDATA" /var/run/postgresql
  exec setpriv --reuid 999 --regid 999 --clear-groups "$0" "$@"
fi
if [ "${1:-}" = postgres ] && [ ! -s "$PGDATA/PG_VERSION" ]; then
  user="${POSTGRES_USER:-postgres}"
  initdb --username="$user" --auth-local=trust --auth-host="${POSTGRES_HOST_AUTH_METHOD:-scram-sha-256}" \
    --pwfile=<(printf '%s\n' "${POSTGRES_PASSWORD:-x}") >/dev/null
  echo "host all all all ${POSTGRES_HOST_AUTH_METHOD:-scram-sha-256}" >>"$PGDATA/pg_hba.conf"
  pg_ctl -w -o "-c listen_addresses= -c unix_socket_directories=/var/run/postgresql" start >/dev/null
  run() { psql -v ON_ERROR_STOP=1 --no-psqlrc -h /var/run/postgresql -U "$user" "$@"; }
  database="${POSTGRES_DB:-$user}"
  [ "$database" = postgres ] || run -d postgres -c "CREATE DATABASE \"$database\""
  for file in /docker-entrypoint-initdb.d/*.sql; do
    [ ! -e "$file" ] || run -d "$database" -f "$file"
  done
  pg_ctl -w -m fast stop >/dev/null
  echo "PostgreSQL init process complete; ready for start up."
fi
unset POSTGRES_PASSWORD
[ "${1:-}" = postgres ] && set -- "$@" -c listen_addresses='*' -c unix_socket_directories=/var/run/postgresql
exec "$@"
