"""From files to a stream of steps: dataset configs, RecBole's atomic files, splits into blocks or sessions.

In come a dataset's name and stream settings, out goes a ``stream.Stream``. Converting and making data is here too:
``files/`` are tables, ``items/`` what is known of items, ``streams/`` the kinds of streams but for blocks.
"""
