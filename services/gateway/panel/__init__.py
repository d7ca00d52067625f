"""The panel's files: plain HTML, one style sheet and ES modules, served as they are."""
