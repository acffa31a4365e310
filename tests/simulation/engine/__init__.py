"""What a simulated world runs on: turns of threads, locks, event loops, sockets."""
