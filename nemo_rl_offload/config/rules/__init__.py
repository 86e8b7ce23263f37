"""The rules that join several keys, by what they are about."""
