-- Tokens of the web door.

-- name: add_api_token
insert into {schema}.api_tokens (id, name, hash, seal, scopes, created_by, expires_at)
values (%(id)s, %(name)s, %(hash)s, %(seal)s, %(scopes)s, %(created_by)s,
        clock_timestamp() + make_interval(secs => %(expires_in_s)s::double precision))
returning id;

-- name: api_tokens
-- Asked twice a second while anybody comes in: people make few tokens.
select id, name, hash, seal, scopes, extract(epoch from created_at)::double precision, created_by,
       extract(epoch from expires_at)::double precision, extract(epoch from revoked_at)::double precision,
       revoked_at is null and (expires_at is null or expires_at > clock_timestamp())
from {schema}.api_tokens
order by created_at, id;

-- name: revoke_api_token
update {schema}.api_tokens set revoked_at = clock_timestamp() where id = %(id)s and revoked_at is null returning id;
