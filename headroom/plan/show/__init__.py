"""How a plan is shown: table, JSON, SVG, settings of other programs."""
