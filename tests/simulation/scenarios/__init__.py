"""What real servers and their models are made to do alike, so that their replies can be compared."""
