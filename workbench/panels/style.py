"""The style sheet of the panels, in the colours of JupyterLab's theme."""

STYLE = """
.l2l-workbench{max-width:1240px;padding:8px 12px 12px;overflow:hidden;color:var(--jp-ui-font-color1);
border:1px solid var(--jp-border-color2,#8884);border-radius:6px}
.l2l-workbench .widget-html{width:100%;margin:0}
.l2l-workbench .widget-html-content{line-height:1.35}
.l2l-title{display:flex;gap:12px;align-items:center;font-size:13px;font-variant-numeric:tabular-nums}
.l2l-state{border:2px solid;border-radius:12px;padding:1px 12px;font-weight:600;min-width:78px;text-align:center;white-space:nowrap}
.l2l-progress{display:flex;gap:10px;align-items:center;font-size:12px;font-variant-numeric:tabular-nums;white-space:nowrap}
.l2l-bar{flex:0 0 160px;height:8px;border-radius:4px;background:color-mix(in srgb,currentColor 12%,transparent);overflow:hidden}
.l2l-bar>div{height:100%}
.l2l-queued{font-size:12px;opacity:.75}
.l2l-buttons,.l2l-settings,.l2l-player{align-items:center;overflow:visible}
.l2l-workbench button:focus-visible{outline:2px solid var(--jp-brand-color1,#1976d2);outline-offset:1px}
.l2l-failure{border:1px solid #D55E00;border-left-width:6px;border-radius:4px;padding:8px 12px;font-size:13px}
.l2l-failure pre{white-space:pre-wrap;font-size:12px;line-height:1.35;margin:4px 0;max-height:320px;overflow:auto}
.l2l-failure p{margin:4px 0}
.l2l-empty{opacity:.65;font-size:12px;padding:24px 0;text-align:center}
.l2l-below>*{flex:1 1 50%;min-width:0}
.l2l-workbench .l2l-behind.widget-accordion .jp-Collapse-header{font-size:12px;font-weight:400;background:none;border:0;padding:2px 4px;opacity:.7;min-height:0}
.l2l-workbench .l2l-behind.widget-accordion .jp-Collapse-header:hover,.l2l-workbench .l2l-behind.widget-accordion .jp-Collapse-open>.jp-Collapse-header{background:none;opacity:1}
.l2l-workbench .l2l-behind.widget-accordion .jp-Collapse-contents{border:0;padding:2px 4px}
.l2l-behind,.l2l-behind .jp-Collapse{margin:0}
.l2l-buttons .widget-button,.l2l-player .widget-button{height:28px;line-height:28px}
.l2l-settings{gap:4px 18px}
.l2l-settings .widget-toggle-buttons .widget-toggle-button{font-size:12px}
""".replace("\n", "")
