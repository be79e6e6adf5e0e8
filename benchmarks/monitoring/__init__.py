"""A real server in overload, as its dashboard and `top` show it."""
