"""Which promises can be tried out on a user's own job, and what came of it?"""
