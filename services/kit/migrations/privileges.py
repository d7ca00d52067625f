"""Roles and schemas of PostgreSQL: made by whoever administers the server, checked by each service before it serves."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from importlib.resources.abc import Traversable

from schemas.errors import Ql3Error
from services.kit.database import Database, DatabaseConfig, Statement, Transaction, schema_name
from services.kit.database.postgresql import connect, translated
from services.kit.migrations.postgresql import rights_of
from services.kit.migrations.stream import Step, load

_RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER")


class PrivilegesInvalid(Ql3Error):  # noqa: N818 - an error is named for what happened
    """The service's role has other rights than it should. `facts` names each, without any value."""

    def __init__(self, facts: list[str]) -> None:
        self.facts = facts
        shown = ", ".join(facts[:8])
        super().__init__(
            "setup_invalid",
            f"The database role has other rights than it should ({shown}); run `ql3 migrate`.",
            field="database",
            data={"facts": facts[:32]},
        )


async def provision_postgresql(admin_dsn: str, services: Iterable[str], passwords: Mapping[str, str]) -> None:
    """Makes each service's schema and login role, `ql3_<service>`, or sets a role's password anew. Safe to repeat.

    `admin_dsn` names a role that may create roles and schemas; it will own the schemas. A password leaves this process
    only as its SCRAM verifier, so that no server log can hold it.
    """
    connection = await connect(DatabaseConfig(url=admin_dsn), "admin")
    try:
        await connection.execute("BEGIN")
        database = await connection.fetchval("SELECT quote_ident(current_database())")
        await connection.execute(f"REVOKE CREATE, TEMPORARY ON DATABASE {database} FROM PUBLIC")
        await connection.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
        for service in services:
            role = schema_name(service)
            # Two commands that provision at once take turns at each role.
            await connection.fetchval("SELECT pg_advisory_xact_lock(hashtextextended('ql3-role:' || $1, 0))", role)
            if await connection.fetchval("SELECT 1 FROM pg_roles WHERE rolname = $1", role) is None:
                await connection.execute(f"CREATE ROLE {role}")
            await connection.execute(f"ALTER ROLE {role} LOGIN NOCREATEDB NOCREATEROLE NOINHERIT")
            password = passwords.get(service)
            if password is not None:
                verifier = scram_verifier(password)
                await connection.execute(f"ALTER ROLE {role} PASSWORD '{verifier}'")
            await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {role}")
            await connection.execute(f"REVOKE ALL ON SCHEMA {role} FROM PUBLIC")
            await connection.execute(f"GRANT CONNECT ON DATABASE {database} TO {role}")
        await connection.execute("COMMIT")
    except Exception as error:
        raise translated(error) from error
    finally:
        await connection.close()


def scram_verifier(password: str, *, salt: bytes | None = None, iterations: int = 4096) -> str:
    """What PostgreSQL stores for a password (SCRAM-SHA-256), which is 1 to 255 printable ASCII characters."""
    if not password or len(password) > 255 or not password.isascii() or not password.isprintable():
        raise Ql3Error("setup_invalid", "A database password is 1 to 255 printable ASCII characters.", field="password")
    salt = salt or os.urandom(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, iterations)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server = hmac.digest(salted, b"Server Key", "sha256")
    return f"SCRAM-SHA-256${iterations}:{_base64(salt)}${_base64(stored)}:{_base64(server)}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


_ROLE = Statement("""
    SELECT r.rolsuper AS superuser, r.rolcreaterole AS create_role, r.rolcreatedb AS create_database,
      r.rolreplication AS replication, r.rolbypassrls AS bypass_rls,
      EXISTS (SELECT 1 FROM pg_auth_members m WHERE m.member = r.oid) AS member_of_another_role,
      has_database_privilege(current_database(), 'CREATE') AS create_schema,
      has_schema_privilege('public', 'CREATE') AS create_in_public
    FROM pg_roles r WHERE r.rolname = current_user
""")
_SCHEMA = Statement("""
    SELECT nspname AS name, nspname = $1 AS own, nspowner = current_user::regrole AS owner,
      has_schema_privilege(oid, 'USAGE') AS usage, has_schema_privilege(oid, 'CREATE') AS creates
    FROM pg_namespace WHERE nspname LIKE 'ql3\\_%' ORDER BY nspname
""")
_TABLES = Statement("""
    SELECT relname AS name, relowner = current_user::regrole AS owner,
      has_table_privilege(oid, 'SELECT') AS "SELECT",
      has_table_privilege(oid, 'INSERT') AS "INSERT",
      has_table_privilege(oid, 'UPDATE') OR has_any_column_privilege(oid, 'UPDATE') AS "UPDATE",
      has_table_privilege(oid, 'DELETE') AS "DELETE",
      has_table_privilege(oid, 'TRUNCATE') AS "TRUNCATE",
      has_table_privilege(oid, 'REFERENCES') AS "REFERENCES",
      has_table_privilege(oid, 'TRIGGER') AS "TRIGGER"
    FROM pg_class WHERE relnamespace = to_regnamespace($1) AND relkind IN ('r', 'p') ORDER BY relname
""")


async def verify_privileges(database: Database, *, root: Traversable | None = None) -> None:
    """Refuses a role with too few or too many rights. Raises `PrivilegesInvalid`. SQLite has no roles."""
    if database.dialect == "sqlite":
        return
    steps = load(database.service, "postgresql", root)
    facts = await database.read(lambda tx: _facts(tx, schema_name(database.service), steps))
    if facts:
        raise PrivilegesInvalid(facts)


async def _facts(tx: Transaction, schema: str, steps: list[Step]) -> list[str]:
    facts: list[str] = []
    role = await tx.fetch_one(_ROLE) or {}
    facts += [f"role:{right}" for right, has in role.items() if has]
    own = False
    for row in await tx.fetch(_SCHEMA, schema):
        own = own or row["own"]
        if row["usage"] != row["own"]:
            facts.append(f"schema:{row['name']}:usage")
        facts += [f"schema:{row['name']}:{right}" for right in ("owner", "creates") if row[right]]
    if not own:
        facts.append(f"schema:{schema}:missing")
    for row in await tx.fetch(_TABLES, schema):
        expected = rights_of(row["name"], steps)
        facts += [f"table:{row['name']}:{right}" for right in _RIGHTS if row[right] != (right in expected)]
        if row["owner"]:
            facts.append(f"table:{row['name']}:owner")
    return facts
