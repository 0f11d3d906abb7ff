"""The site of docs/ and wiki/: `python -m docs.site.build`."""
