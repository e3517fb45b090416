-- Tokens of the web door.

-- name: add_api_token
INSERT INTO unstuck_api_tokens (id, name, hash, seal, scopes, created_at, created_by, expires_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?);

-- name: api_tokens
-- Asked twice a second while anybody comes in: people make few tokens.
SELECT id, name, hash, seal, scopes, created_at, created_by, expires_at, revoked_at
FROM unstuck_api_tokens
ORDER BY created_at, id;

-- name: revoke_api_token
UPDATE unstuck_api_tokens SET revoked_at = ?2 WHERE id = ?1 AND revoked_at IS NULL;
