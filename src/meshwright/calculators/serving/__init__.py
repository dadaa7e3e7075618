"""A replica that serves, in closed form: what it holds, how long its steps take, what requests cost."""
