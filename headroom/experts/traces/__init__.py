"""What routers chose, token by token: recorded, imposed, synthesised, replayed through caches."""
