"""What several stores share."""
