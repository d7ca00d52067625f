"""PostgreSQL roles: a service has exactly its rights on exactly its schema; one more or one less is refused."""

from __future__ import annotations

import base64
import hmac

import asyncpg
import pytest

from schemas.errors import Ql3Error
from services.kit.database import Database, DatabaseConfig, NotPermitted, Statement, open_database
from services.kit.migrations import PrivilegesInvalid, migrate, provision_postgresql, verify, verify_privileges
from services.kit.migrations.privileges import scram_verifier
from tests.fixtures_database import DatabaseFor, Postgres, database_configs, owner_dsn


@pytest.fixture
async def database(database_on: DatabaseFor) -> Database:
    return await database_on("postgresql", "plain")


async def as_owner(database: Database, sql: str) -> None:
    connection = await asyncpg.connect(owner_dsn(database_configs[database]))
    await connection.execute("SET search_path = ql3_plain")
    await connection.execute(sql)
    await connection.close()


async def test_a_migrated_schema_gives_exactly_the_rights_it_should(database: Database):
    await verify_privileges(database)
    await verify(database, "plain")


async def test_a_file_has_no_roles(database_on: DatabaseFor):
    await verify_privileges(await database_on("sqlite", "plain"))


@pytest.mark.parametrize(
    ("sql", "fact"),
    [
        ("REVOKE INSERT ON outbox FROM ql3_plain", "table:outbox:INSERT"),
        ("GRANT DELETE ON audit_events TO ql3_plain", "table:audit_events:DELETE"),
        ("GRANT UPDATE (detail) ON audit_events TO ql3_plain", "table:audit_events:UPDATE"),
        ("GRANT UPDATE ON kit_clock TO ql3_plain", "table:kit_clock:UPDATE"),
        ("GRANT TRUNCATE ON outbox TO ql3_plain", "table:outbox:TRUNCATE"),
        ("GRANT INSERT ON schema_migrations TO ql3_plain", "table:schema_migrations:INSERT"),
        ("GRANT CREATE ON SCHEMA ql3_plain TO ql3_plain", "schema:ql3_plain:creates"),
        ("CREATE SCHEMA ql3_other; GRANT USAGE ON SCHEMA ql3_other TO ql3_plain", "schema:ql3_other:usage"),
        ("GRANT CREATE ON SCHEMA public TO ql3_plain", "role:create_in_public"),
        ("CREATE TABLE rogue (id TEXT)", "table:rogue:SELECT"),
        ("ALTER TABLE outbox OWNER TO ql3_plain", "table:outbox:owner"),
        (
            "DO $$ BEGIN EXECUTE format('GRANT CREATE ON DATABASE %I TO ql3_plain', current_database()); END $$",
            "role:create_schema",
        ),
    ],
)
async def test_one_right_more_or_less_is_refused_by_name(database: Database, sql: str, fact: str):
    await as_owner(database, sql)
    with pytest.raises(PrivilegesInvalid) as refused:
        await verify_privileges(database)
    assert fact in refused.value.facts
    assert fact in str(refused.value)


async def test_migrating_again_mends_the_rights(database: Database):
    await as_owner(
        database,
        "GRANT DELETE, TRUNCATE ON audit_events TO ql3_plain; GRANT UPDATE (detail) ON audit_events TO ql3_plain;"
        "REVOKE INSERT ON outbox FROM ql3_plain",
    )
    await migrate(DatabaseConfig(url=owner_dsn(database_configs[database])), "plain")
    await verify_privileges(database)


async def test_a_superuser_has_too_many_rights(postgres: Postgres, database: Database):
    owner = await open_database(DatabaseConfig(url=owner_dsn(database_configs[database])), "plain")
    with pytest.raises(PrivilegesInvalid) as refused:
        await verify_privileges(owner)
    assert "role:superuser" in refused.value.facts
    await owner.close()


async def test_a_member_of_another_role_has_too_many_rights(database: Database):
    await as_owner(database, "GRANT pg_read_all_data TO ql3_plain")
    try:
        with pytest.raises(PrivilegesInvalid) as refused:
            await verify_privileges(database)
        assert "role:member_of_another_role" in refused.value.facts
    finally:
        await as_owner(database, "REVOKE pg_read_all_data FROM ql3_plain")


async def test_a_service_cannot_shift_the_clock_nor_rewrite_its_history(database: Database):
    for sql in ("UPDATE kit_clock SET shift_ms = 1", "DELETE FROM schema_migrations", "CREATE TABLE mine (id TEXT)"):
        with pytest.raises(NotPermitted):
            await database.transact(lambda tx, sql=sql: tx.execute(Statement(sql)))


async def test_a_service_sees_nothing_of_another(postgres: Postgres):
    name = await postgres.empty()
    dsn = postgres.admin_dsn(name)
    await provision_postgresql(dsn, ["vault", "plain"], {"vault": postgres.password, "plain": postgres.password})
    for service in ("vault", "plain"):
        await migrate(DatabaseConfig(url=dsn), service)
    plain = await open_database(postgres.config(name), "plain")
    with pytest.raises(NotPermitted):
        await plain.read(lambda tx: tx.fetch(Statement("SELECT id FROM ql3_vault.outbox")))
    await verify_privileges(plain)
    await plain.close()
    await postgres.drop(name)


async def test_provisioning_again_sets_a_new_password(postgres: Postgres):
    name = await postgres.empty()
    dsn = postgres.admin_dsn(name)
    await provision_postgresql(dsn, ["rotated"], {"rotated": "first-password"})
    await provision_postgresql(dsn, ["rotated"], {"rotated": "second-password"})
    url = postgres.config(name).url
    with pytest.raises(Ql3Error):
        await open_database(DatabaseConfig(url=url, password="first-password"), "rotated")
    await (await open_database(DatabaseConfig(url=url, password="second-password"), "rotated")).close()
    await postgres.drop(name)


@pytest.mark.parametrize("password", ["", "x" * 256, "pässword", "new\nline"])
def test_a_password_that_roads_may_garble_is_refused(password: str):
    with pytest.raises(Ql3Error) as refused:
        scram_verifier(password)
    assert password == "" or password not in str(refused.value)


def test_a_verifier_is_the_one_of_the_standard():
    """The example of RFC 7677: the server's signature comes out of the key that the verifier holds."""
    verifier = scram_verifier("pencil", salt=base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ=="), iterations=4096)
    server_key = base64.b64decode(verifier.rpartition(":")[2])
    nonce = "rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    exchange = f"n=user,r=rOprNGfwEbeRWgbNEkqO,r={nonce},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096,c=biws,r={nonce}"
    signature = base64.b64encode(hmac.digest(server_key, exchange.encode(), "sha256"))
    assert signature == b"6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    assert "pencil" not in verifier
