"""Models of database servers, and of a driver: the statements of the package as transactions that wait for rows."""
