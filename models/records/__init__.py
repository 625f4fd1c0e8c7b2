"""Records that stages exchange. Importing any of them declares the kinds of shards to the store."""

from models.records import schemas as schemas
