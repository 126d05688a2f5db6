"""Methods of users and of sessions."""
