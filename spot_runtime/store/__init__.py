"""The tensor store: the only user of fsspec for the runtime's own objects."""
