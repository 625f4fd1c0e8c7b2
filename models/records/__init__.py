"""Records that stages exchange. Importing this package registers the schemas of all shards with the store."""

from rheostat.models.records import schemas as schemas
