"""Where locks are kept. ``base`` is the contract that every store keeps."""
