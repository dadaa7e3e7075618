"""Pipeline schedules: orders, tick tables, closed forms, simulation."""
