"""Workers in any language: what the HTTP server keeps and does for them.

They stand in the same table as Python's own, take jobs from the same queues, and are judged by their lease alone.
"""
