"""The `outrider` command: the local stack, one service by itself, and a client for the terminal.

May import shared, and of the other services their settings; their servers only when it runs one.
"""
