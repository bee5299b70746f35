"""Drawing a timeline: in the terminal, as SVG, PNG and Perfetto trace, and many side by side.

`svg`, `png` and `gallery` share one path: timeline -> scene (`_chart`, `_lanes`) -> file. A scene is plain geometry in
pixels, so both formats show the same picture and tests can hold laws over it.
"""
