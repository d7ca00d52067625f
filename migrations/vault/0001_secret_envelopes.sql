-- Secret values, encrypted. Versions are appended; the highest is current.
CREATE TABLE secret_envelopes (
    project       TEXT    NOT NULL CHECK (length(project) BETWEEN 1 AND 128),
    name          TEXT    NOT NULL CHECK (length(name) BETWEEN 1 AND 128),
    version       BIGINT  NOT NULL CHECK (version BETWEEN 1 AND 2147483647),
    mutation_id   TEXT    NOT NULL CHECK (length(mutation_id) BETWEEN 1 AND 64),
    key_id        TEXT    NOT NULL CHECK (length(key_id) BETWEEN 1 AND 128),
    algorithm     TEXT    NOT NULL CHECK (algorithm = 'aes-256-gcm'),
    -- unpadded base64url of 12, 1 to 16384 and 16 bytes
    nonce         TEXT    NOT NULL CHECK (length(nonce) = 16),
    ciphertext    TEXT    NOT NULL CHECK (length(ciphertext) BETWEEN 2 AND 21846),
    auth_tag      TEXT    NOT NULL CHECK (length(auth_tag) = 22),
    created_at_ms BIGINT  NOT NULL CHECK (created_at_ms >= 0),
    PRIMARY KEY (project, name, version)
);
-- ql3: append-only secret_envelopes

CREATE UNIQUE INDEX secret_envelopes_mutation ON secret_envelopes (project, name, mutation_id);
-- what is still encrypted under a key, before the key is removed from the keyring
CREATE INDEX secret_envelopes_key ON secret_envelopes (key_id, project, name, version);
