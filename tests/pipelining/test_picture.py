"""Schedules as pictures: in a terminal, and as SVG."""

import xml.etree.ElementTree as xml

from mesh_tensor.api.pipeline.explain import svg, terminal
from mesh_tensor.pipelining import Schedule

SVG = "{http://www.w3.org/2000/svg}"


def test_terminal():
    assert terminal(Schedule.named("1f1b", 2, 2)) == (
        "mesh 0  F0 F1 ......B0    ...B1\n"
        "mesh 1  ...F0 B0    F1 B1    ......"
    )  # fmt: skip


def test_terminal_names_stages_where_a_mesh_has_several_and_keeps_a_width():
    assert terminal(Schedule.named("zbv", 1, 1)) == "mesh 0  0F0 1F0 1I0 1W0 0I0 0W0"
    lines = terminal(Schedule.named("gpipe", 4, 32), width=60).splitlines()
    assert {len(line) for line in lines} == {68}


def test_terminal_in_colors():
    assert terminal(Schedule.named("forward", 1, 1), color=True) == "mesh 0  \033[44;30mF0 \033[0m"


def test_svg_has_a_box_per_action_where_the_clock_puts_it():
    schedule = Schedule.named("zb-h1", 3, 5)
    root = xml.fromstring(svg(schedule))
    boxes = root.findall(f"{SVG}g")
    assert len(boxes) == sum(map(len, schedule.rows))
    assert root.find(f"{SVG}title").text == "zb-h1"
    titles = [box.find(f"{SVG}title").text for box in boxes]
    assert "2I0: input gradient of stage 2, microbatch 0, 3 to 4" in titles
    first = [box.find(f"{SVG}rect") for box in boxes if box.find(f"{SVG}title").text.startswith(("0F0:", "1F0:"))]
    assert [float(rect.get("x")) for rect in first] == [70, 92]
    assert [float(rect.get("y")) for rect in first] == [5, 33]
