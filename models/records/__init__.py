"""Records that stages exchange. Importing any of these modules registers the kinds of shards with the store."""

from models.records import schemas as schemas
