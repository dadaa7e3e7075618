"""Pipeline schedules: orders of passes, tick tables, closed forms, simulation."""
