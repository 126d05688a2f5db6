"""What makes a ``stream.Stream``, of sessions, of domains or made up; what keeps one, and what alters one."""
