"""The report's style sheet: light, dark and print; no fonts and no files."""

STYLE = """
:root{--ink:#1b2430;--soft:#5b6878;--line:#e1e6ec;--paper:#f5f7fa;--card:#fff;--accent:#2563eb;
--ok:#1f9d8a;--retry:#e0a030;--calm:#8796b0;--bad:#d1435b;--mute:#b9c2cf;--mute2:#9a8fb5;
--deep:#174ea6;--danger:#d1435b1c;--warnbg:#fff6e0;--badbg:#fdecef;--okbg:#e8f7f4}
@media (prefers-color-scheme:dark){:root{--ink:#e6ebf2;--soft:#9aa7b8;--line:#2b3542;
--paper:#11161d;--card:#1a212b;--accent:#6ea0ff;--ok:#34bfa8;--retry:#e9b450;--calm:#7f90ad;--bad:#f0657c;
--mute:#4b5768;--mute2:#7f739c;--deep:#9cc0ff;--danger:#f0657c26;--warnbg:#33290f;--badbg:#381820;
--okbg:#10312b}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 24px 64px}
header h1{font-size:26px;margin:0;letter-spacing:-.02em}
header p{margin:4px 0 0;color:var(--soft)}
.notice{margin:18px 0 0;padding:10px 14px;border-radius:10px;background:var(--warnbg)}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(225px,1fr));gap:14px;
margin:24px 0}
.card{background:var(--card);border:1px solid var(--line);border-radius:14px;padding:14px 16px;
border-top:3px solid var(--mute)}
.card h2{margin:0;font-size:12px;font-weight:600;color:var(--soft);text-transform:uppercase;
letter-spacing:.05em}
.card strong{display:block;font-size:27px;line-height:1.25;font-weight:650;
font-variant-numeric:tabular-nums;letter-spacing:-.02em}
.card span{color:var(--soft);font-size:13px}
.card.good{border-top-color:var(--ok)}.card.warn{border-top-color:var(--retry)}
.card.poor{border-top-color:var(--bad)}
.card.warn b,.card.poor b{font-size:12px;font-weight:600;padding:1px 7px;border-radius:9px;
margin-left:8px;vertical-align:middle}
.card.warn b{background:var(--warnbg)}.card.poor b{background:var(--badbg)}
section{background:var(--card);border:1px solid var(--line);border-radius:14px;
padding:18px 20px;margin:16px 0;break-inside:avoid}
section h2{font-size:17px;margin:0 0 2px;letter-spacing:-.01em}
section>p{margin:0 0 12px;color:var(--soft);max-width:75ch}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:16px}
.pair section{margin:0}
@media (max-width:900px){.pair{grid-template-columns:1fr}}
svg{display:block;width:100%;height:auto;overflow:visible}
.wide{overflow-x:auto}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:6px 18px;margin:0 0 10px;padding:0;
font-size:13px;color:var(--soft)}
.legend li{display:flex;align-items:center;gap:7px}.legend svg{width:12px;height:12px}
.ok{fill:var(--ok)}.retry{fill:var(--retry)}.calm{fill:var(--calm)}.bad{fill:var(--bad)}
.mute{fill:var(--mute)}.mute2{fill:var(--mute2)}.heat{fill:var(--accent)}
.p90,.margin{fill:var(--accent)}.p99{fill:var(--accent);fill-opacity:.35}
.danger{fill:var(--danger)}.grid{stroke:var(--line)}.whisker{stroke:var(--soft);stroke-opacity:.5}
.edge{stroke:var(--soft);stroke-width:2}.dot,.dot99{fill:var(--deep)}.dotbad{fill:var(--bad)}
.line50,.line99{fill:none;stroke:var(--accent);stroke-width:2;stroke-linejoin:round}
.line99{stroke:var(--deep);stroke-dasharray:5 4;stroke-width:1.5}
svg rect:hover,svg g:hover rect,svg circle:hover{opacity:.75}
text{fill:var(--ink);font-size:13px}.axis{fill:var(--soft);font-size:12px;
font-variant-numeric:tabular-nums}.label{font-size:13px}.end{text-anchor:end}
.middle{text-anchor:middle}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th,td{padding:6px 10px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{font-weight:600;color:var(--soft);font-size:12px}
th:first-child,td:first-child{text-align:left;max-width:300px;overflow:hidden;text-overflow:ellipsis}
td.text,th.text{text-align:left}tbody tr:hover{background:var(--paper)}
tbody td.warn{background:var(--warnbg)}td.poor{background:var(--badbg)}
details summary{cursor:pointer;font-weight:600;font-size:17px}
details[open] summary{margin-bottom:10px}
footer{color:var(--soft);font-size:13px;margin-top:26px}
@media print{body{background:#fff}main{max-width:none}.card,section{border-color:#ccc}}
"""
