"""How gunicorn runs the shop: several processes, because threads of one could do with a ``threading.Lock``."""

wsgi_app = "example_project.wsgi"
workers = 4
worker_class = "gthread"
threads = 12
graceful_timeout = 5
loglevel = "warning"
control_socket_disable = True  # it would be one file in the home directory for every gunicorn there is
