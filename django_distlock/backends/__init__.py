"""The stores that keep locks. ``base`` is the contract that every store implements."""
