"""recbole"""
