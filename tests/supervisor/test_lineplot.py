"""Pictures that a browser would draw: read back as XML."""

import math
import xml.etree.ElementTree as ET

from ckptd.lineplot import Curve, Mark, svg

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*curves, **options):
    options = {"title": "a < b", "x_label": "x", "y_label": "y"} | options
    return ET.fromstring(svg(curves, **options))


def points(element):
    return [tuple(map(float, pair.split(","))) for pair in element.get("points").split()]


def test_a_curve_goes_where_its_numbers_are():
    (line,) = drawn(Curve(name="c", x=[1, 2, 3], y=[0, 10, 5])).iter(f"{SVG}polyline")
    (x1, y1), (x2, y2), (x3, y3) = points(line)
    assert x2 - x1 == x3 - x2 > 100
    assert y1 > y3 > y2  # SVG counts downwards
    assert y1 - y3 == y3 - y2


def test_a_logarithmic_axis():
    (line,) = drawn(Curve(name="c", x=[1, 10, 100], y=[1, 1, 1]), log_x=True).iter(f"{SVG}polyline")
    (x1, _), (x2, _), (x3, _) = points(line)
    assert x2 - x1 == x3 - x2 > 100


def test_what_is_not_finite_breaks_the_line():
    lines = list(drawn(Curve(name="c", x=[1, 2, 3, 4, 5], y=[1, 2, math.nan, 3, math.inf])).iter(f"{SVG}polyline"))
    assert [len(points(line)) for line in lines] == [2, 1]


def test_words_are_shown_and_escaped():
    root = drawn(Curve(name="<c>", x=[1, 2], y=[1, 2]), marks=[Mark(name="best & only", x=1.5), Mark(name="off", x=9)])
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert {"a < b", "<c>", "best & only", "x", "y"} <= set(words)
    assert "off" not in words


def test_degenerate_data_still_make_a_picture():
    for curve in (Curve(name="c", x=[], y=[]), Curve(name="c", x=[3], y=[0]), Curve(name="c", x=[0, 3], y=[2, 2])):
        for log_x in (False, True):
            assert "NaN" not in ET.tostring(drawn(curve, log_x=log_x), encoding="unicode")
