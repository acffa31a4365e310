"""The lock: how it is acquired, waited for, kept alive and released, whatever the store."""
