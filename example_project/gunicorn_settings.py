"""gunicorn's settings for the shop: several processes, because a ``threading.Lock`` is enough for threads of one."""

wsgi_app = "example_project.wsgi"
workers = 4
worker_class = "gthread"
threads = 12
graceful_timeout = 5
loglevel = "warning"
control_socket_disable = True  # the socket would be one file in the home directory for all gunicorns
