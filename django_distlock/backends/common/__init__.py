"""Parts that several stores share."""
