"""The embedded tiny base and how it is made."""
