"""The commands of ``mmserve``: each module has ``add(commands)`` for its flags and ``run(args)``."""
