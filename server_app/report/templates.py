"""The HTML of the report pages, in Jinja's language; in Python strings, as the app bundle carries no .html files.

Every value is escaped. The page's Content-Security-Policy lets nothing load or run even if one were not.
"""

STYLE = """
body { margin: 0; background: #f6f7f9; color: #1c2430; font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 32px 16px 64px; }
section { background: #fff; border: 1px solid #dde2e8; border-radius: 10px; padding: 20px 18px; margin-top: 20px; }
h1 { font-size: 28px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 12px; }
.badge { border-radius: 99px; padding: 3px 12px; font-size: 13px; vertical-align: 5px; background: #dcebf7; }
.finished { background: #d8f0e6; } .failed { background: #fbe0d0; }
.sub, .hint, th { color: #5b6675; } .sub { margin: 6px 0 0; overflow-wrap: anywhere; } .hint { font-size: 13px; }
.lead { font-size: 18px; margin: 20px 0 0; max-width: 46em; }
.notice { border-left: 5px solid #d55e00; background: #fff7f2; }
.notice p { margin: 10px 0 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.scroll { overflow: auto; max-height: 540px; } @media print { .scroll { max-height: none; } }
img { max-width: min(100%, 1080px); height: auto; display: block; margin: 0 auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; min-width: 40%; }
th, td { text-align: right; padding: 5px 8px; border-bottom: 1px solid #dde2e8; vertical-align: top; }
td { white-space: nowrap; } th { position: sticky; top: 0; background: #fff; }
.t { text-align: left; white-space: normal; overflow-wrap: break-word; }
.t:first-child:nth-last-child(n+5) { min-width: 10em; }
"""

PAGE = (
    """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<style>"""
    + STYLE
    + """</style>
<title>{{ title }}</title></head>
<body><main>
{% block top %}
<h1>{{ title }}</h1>
{% endblock %}
{% for section in sections %}
<section><h2>{{ section.name }}</h2>
{% if section.png %}
<img alt="{{ section.name }}" src="data:image/png;base64,{{ section.png }}">
{% elif section.rows %}
<div{% if section.head %} class="scroll"{% endif %}><table>
<tr>
{% for cell in section.head %}
<th{% if loop.index <= section.text %} class="t"{% endif %}>{{ cell }}</th>
{% endfor %}
</tr>
{% for row in section.rows %}
<tr>
{% for cell in row %}
<td{% if loop.index <= section.text %} class="t"{% endif %}>{{ cell | as_text }}</td>
{% endfor %}
</tr>
{% endfor %}
</table></div>
{% else %}
none
{% endif %}
{% if section.note %}
<p class="hint">{{ section.note }}</p>
{% endif %}
</section>
{% endfor %}
</main></body></html>
"""
)

RUN = """{% extends "page" %}
{% block top %}
{% set done, status = run.matrix | length, run.results["status"] %}
<h1>{{ title }} <span class="badge {{ status }}">{{ status }}</span></h1>
<p class="sub">{{ facts }}</p>
{% set unlearned = run.results.get("tasks_not_learned") %}
{% if unlearned %}
<section class="notice">
<strong>Not learned: {{ "task" if unlearned | length == 1 else "tasks" }} {{ unlearned | join(", ") }}.</strong>
No client with its images has trained in any of its rounds: they failed, were away or not drawn, or the
rounds were dropped.
</section>
{% endif %}
{% if run.gaps %}
<section class="notice">
<strong>Not measured: {% for row in run.gaps | groupby(0) %}{{ "; " if not loop.first }}after task {{ row.grouper }}, on
task{{ "s" if row.list | length > 1 }} {{ row.list | map(attribute=1) | join(", ") }}{% endfor %}.</strong>
Nodes that hold test images of these tasks were away, or had none then. Metrics that need these accuracies are left out.
</section>
{% endif %}
{% if run.incomplete %}
<section class="notice">
<strong>Measured on fewer test images than nodes hold: {% for task, now, held in run.incomplete
%}{{ ", " if not loop.first }}after task {{ task }} on {{ now }} of {{ held }}{% endfor %}.</strong>
Nodes were away. Accuracies on different images differ for that reason too, and so does forgetting.
</section>
{% endif %}
{% if run.copies %}
<section class="notice">
<strong>Copied test images: {{ run.copies }}.</strong>
They are training images too, byte by byte, so that the accuracy is too high: keep one copy of each image.
</section>
{% endif %}
{% if run.untested and run.samples | sum %}
<section class="notice">
<strong>Not tested: {{ run.untested | join(", ") }}.</strong>
No test image of {{ "this class" if run.untested | length == 1 else "these classes" }} was evaluated at the end.
{% if run.untested_tasks %}
So nothing is known of task{{ "s" if run.untested_tasks | length > 1 }} {{ run.untested_tasks | join(", ") }}, and not
how much the model has forgotten.
{% endif %}
</section>
{% endif %}
{% if status == "finished" and not run.samples | sum %}
<section class="notice">
<strong>No accuracy is known.</strong> No task has test images.
</section>
{% elif not run.finished %}
<section class="notice">
<strong>{{ "This run failed." if status == "failed" else "This run has not finished." }}</strong>
{{ done }} of {{ run.seen | length }} tasks are finished.
{{ "The numbers cover the finished tasks only." if done else "No task is finished yet, so there is no accuracy." }}
{% if run.results.get("error") %}
<p>{{ run.results["error"] }}</p>
{% endif %}
</section>
{% endif %}
{% if "final_average_accuracy" in run.metrics %}
<p class="lead">
After learning {{ "one task" if done == 1 else done ~ " tasks one after another" }}, the model recognises
<strong>{{ "%.1f %%" | format(100 * run.metrics["final_average_accuracy"]) }}</strong> of the {{ run.evaluated }} images
{%- if "forgetting" in run.metrics and done > 1 %}
{% set lost = 100 * run.metrics["forgetting"] %}
, averaged over the tasks; on the tasks before the last it is
<strong>{{ "%.1f percentage points" | format(lost | abs) }}</strong>
{{ "below" if lost >= 0 else "above" }} its earlier best
{%- if not run.incomplete %}: {{ "that much it has forgotten" if lost >= 0 else "it has forgotten nothing" }}{% endif %}
{%- endif %}.</p>
{% endif %}
{% endblock %}
"""

TEMPLATES = {"page": PAGE, "run": RUN}
