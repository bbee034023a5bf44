#include <algorithm>
#include <cctype>
#include <cstring>
#include <iterator>

#include "core/text.h"
#include "report/across.h"
#include "report/charts.h"
#include "report/comparison.h"
#include "report/format.h"
#include "report/scaling.h"
#include "report/style.h"
#include "report/summary.h"
#include "report/table.h"

namespace headloom::report {
namespace {

std::string element(const std::string& tag, const std::string& css, const std::string& content) {
  const std::string open = css.empty() ? tag : tag + " class=\"" + css + "\"";
  return "<" + open + ">" + content + "</" + tag.substr(0, tag.find(' ')) + ">";
}

std::string small(const std::string& text) {
  return text.empty() ? "" : element("small", "", rich(text));
}

std::string swatch(int style) {
  return str("<svg class=\"swatch s", style,
             "\" viewBox=\"0 0 26 10\" xmlns=\"http://www.w3.org/2000/svg\" aria-hidden=\"true\">"
             "<line class=\"line\" x1=\"0\" y1=\"5\" x2=\"26\" y2=\"5\"/></svg>");
}

// A table that scrolls by itself where the page is narrow. All but `label` is in HTML.
std::string scrolling_table(const std::string& label, const std::string& css,
                            const std::string& caption, const std::string& head,
                            const std::string& body) {
  return "<div class=\"scroll\" role=\"region\" tabindex=\"0\" aria-label=\"" + escape(label) +
         "\">" +
         element("table", css,
                 element("caption", "", caption) + "<thead>" + element("tr", "", head) +
                     "</thead>\n<tbody>\n" + body + "</tbody>") +
         "</div>\n";
}

std::string table_of(const Comparison& c, const TaskSummary& t, const std::string& caption,
                     const std::vector<Column>& columns, bool strips) {
  std::string head = "<th scope=\"col\" class=\"model\">model</th>";
  for (const Column& column : columns) {
    head += element("th scope=\"col\"", column.css == "left" ? "left" : "",
                    rich(column.title) + small(column.note));
    if (column.css == "result" && strips) {
      head += "<th scope=\"col\" class=\"left seeds\">each seed</th>";
    }
  }
  std::string body;
  for (size_t i = 0; i < t.rows.size(); ++i) {
    const Row& row = t.rows[i];
    std::string line = "<th scope=\"row\" class=\"model\">" + swatch(style_of(c, row)) +
                       element("b", "", escape(row.model->label)) + small(row.model->description) +
                       "</th>";
    for (const Column& column : columns) {
      const Cell& cell = column.cells[i];
      // On a phone each cell stands on a line of its own, with its column's title before it.
      std::string label = column.title + (column.note.empty() ? "" : "\n" + column.note);
      std::erase(label, '`');
      line += element("td data-label=\"" + escape(label) + "\"",
                      column.css.empty() ? cell.css : column.css + " " + cell.css,
                      rich(cell.text) + small(cell.note));
      if (column.css == "result" && strips) line += element("td", "seeds", seeds_strip(c, t, row));
    }
    body += element("tr", row.baseline ? "baseline" : "", line) + "\n";
  }
  return scrolling_table(caption, "results", escape(caption), head, body);
}

std::string result_table(const Comparison& c, const TaskSummary& t) {
  const bool strips =
      std::any_of(t.rows.begin(), t.rows.end(), [](const Row& row) { return row.finished > 0; });
  std::vector<Column> quality, cost;
  std::string note = "Best first. ± is half the 95% interval of the mean";
  if (strips) {
    // Like the column, on wide pages alone.
    note += element("span", "seeds",
                    "; under <i>each seed</i> circles are seeds, the bar is their mean, the block "
                    "its 95% interval" +
                        std::string(t.rows.size() > 1 ? " and the dashed line the baseline" : ""));
  }
  note += ".";
  for (const Column& column : result_columns(t)) {
    (column.cost ? cost : quality).push_back(column);
    if (!column.title.starts_with("to match")) continue;
    note += " <i>" + rich(column.title) + "</i>: the share of the baseline's " + t.task->unit +
            " at which a model's mean curve first meets the baseline's final result";
    const auto has = [&](const char* start) {
      return std::any_of(column.cells.begin(), column.cells.end(),
                         [&](const Cell& cell) { return cell.text.starts_with(start); });
    };
    if (has("at most")) {
      note += "; <i>at most</i>, where it meets it at its first evaluation already";
    }
    if (has(kDash)) note += str("; <i>", kDash, "</i>, where it has not met it");
    note += ".";
  }
  std::string out = table_of(c, t, "Results on " + t.task->name, quality, strips) +
                    element("p", "soft small note", note) + "\n";
  if (cost.empty()) return out;
  return out + table_of(c, t, "What it costs on " + t.task->name, cost, false) +
         element("p", "soft small note",
                 "Speeds and memory are medians, with the range below them" +
                     std::string(t.rows.size() > 1 ? "; × is the ratio to the baseline." : ".")) +
         "\n";
}

std::string problems(const TaskSummary& t) {
  std::string items;
  for (const Row& row : t.rows) {
    for (const Run* run : row.runs) {
      const std::string which =
          element("code", "", escape(row.model->label)) + str(", seed ", run->seed, ": ");
      if (const auto& at = run->interruption) {
        items += element("li", "",
                         "Interrupted: " + which + escape(interruption_text(*at)) +
                             ". Go on with: " + element("code", "", escape(at->go_on)));
      }
      const bool failed = run_failed(*run);
      if (!failed && !run_diverged(*run)) continue;
      items += element("li", "",
                       element("span", "failed", failed ? "Failed: " : "Diverged: ") + which +
                           escape(failed ? run_problem(*run) : run->warning));
    }
  }
  for (const Row& row : t.rows) {
    for (const FailedSetting& failed : row.failed_settings) {
      items += element("li", "",
                       element("span", "failed", "Failed in the sweep: ") +
                           element("code", "", escape(row.model->label)) + ", " +
                           escape(failed_setting_text(failed)));
    }
  }
  return items.empty() ? "" : element("ul", "problems", items) + "\n";
}

// "%20".
std::string percent_encoded(char c) {
  constexpr char kHex[] = "0123456789ABCDEF";
  const auto byte = static_cast<unsigned char>(c);
  return {'%', kHex[byte >> 4], kHex[byte & 15]};
}

// For the address of a link that holds its own content (RFC 2397).
std::string data_link(const std::string& type, const std::string& content) {
  std::string out = "data:" + type + ";charset=utf-8,";
  for (const char c : content) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) || (byte < 0x80 && std::strchr("-_.,:[]{}()", c) && c != 0)) {
      out += c;
    } else {
      out += percent_encoded(c);
    }
  }
  return out;
}

// A name for a file and for a place in the page: letters, digits and hyphens.
std::string slug(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte)) {
      out += static_cast<char>(std::tolower(byte));
    } else if (!out.empty() && out.back() != '-') {
      out += '-';
    }
  }
  while (!out.empty() && out.back() == '-') out.pop_back();
  return out;
}

std::string download(const Data& data, const std::string& type, const std::string& ending,
                     const std::string& label, const std::string& content) {
  return "<a download=\"" + slug(data.name) + "." + ending + "\" href=\"" +
         data_link(type, content) + "\" aria-label=\"" + escape(data.name + " as " + label) +
         "\">" + label + "</a>";
}

std::string figure(const Chart& chart) {
  if (chart.drawings.empty()) return "";
  std::string links;
  if (!chart.data.rows.empty()) {
    links = " " + element("span", "links",
                          download(chart.data, "text/csv", "csv", "CSV", to_csv(chart.data)) + " " +
                              download(chart.data, "application/json", "json", "JSON",
                                       to_json(chart.data)));
  }
  const bool several = chart.drawings.size() > 1;
  return (several ? "<figure class=\"wide\">" : "<figure>") +
         (several ? element("div", chart.drawings.size() > 2 ? "panels narrow" : "panels",
                            join(chart.drawings, ""))
                  : chart.drawings[0]) +
         element("figcaption", "", chart.caption + links) + "</figure>\n";
}

// Names may give the same slug, or none.
std::string task_id(const Comparison& c, const TaskInfo& task) {
  return str("task-", &task - c.tasks.data() + 1, "-", slug(task.name));
}

std::string contents(const Comparison& c, const std::vector<TaskGroup>& groups,
                     const std::vector<SizeSeries>& scaling) {
  std::string out;
  const auto link = [](const std::string& id, const std::string& text) {
    return element("li", "", "<a href=\"#" + id + "\">" + escape(text) + "</a>");
  };
  for (size_t i = 0; i < scaling.size(); ++i) {
    out += link(str("scaling-", i + 1), "Scaling on " + scaling[i].name);
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    out += link(str("across-", i + 1), capitalized(groups[i].key) + " of tasks");
  }
  for (const TaskInfo& task : c.tasks) out += link(task_id(c, task), task.name);
  out += link("how", "How this was made") + link("reading", "How to read it");
  return "<nav aria-label=\"Contents\">" + element("ul", "", out) + "</nav>\n";
}

// Whether the results hold under a second initialisation, with its own table.
std::string robustness(const Comparison& c, const TaskSummary& t) {
  std::string out;
  for (size_t i = 0; i < t.robustness.size(); ++i) {
    const TaskSummary& again = t.robustness[i];
    std::vector<Column> quality;
    for (const Column& column : result_columns(again)) {
      if (!column.cost) quality.push_back(column);
    }
    const bool finished = std::any_of(again.rows.begin(), again.rows.end(),
                                      [](const Row& row) { return row.finished > 0; });
    out += element("h3", "", "Under a second initialisation") +
           element("p", "", rich(again.answer)) + "\n" +
           table_of(c.robustness[i], again,
                    "Results on " + t.task->name + " under a second initialisation", quality,
                    finished) +
           problems(again);
  }
  return out;
}

std::string task_section(const Comparison& c, const TaskSummary& t) {
  std::string out =
      element("h2 id=\"" + task_id(c, *t.task) + "\"", "", escape(t.task->name)) +
      element("p", "soft",
              rich(t.task->description +
                   (t.task->apart.empty()
                        ? ""
                        : " It " + t.task->apart + ", so that the two are not compared."))) +
      "\n" + result_table(c, t) + problems(t) + robustness(c, t);
  std::string figures = figure(cost_chart(c, t));
  for (const std::string& key : c.swept) figures += figure(sweep_chart(c, t, key));
  for (const Along along : {Along::kTokens, Along::kFlops, Along::kSeconds}) {
    figures += figure(learning_chart(c, t, along));
  }
  if (t.has_accuracy) figures += figure(accuracy_chart(c, t));
  if (t.rows.size() > 1) figures += figure(gap_chart(c, t));
  for (const Row& row : t.rows) figures += figure(expert_chart(t, row));
  return element("section", "task",
                 out + (figures.empty() ? "" : element("div", "figures", figures))) +
         "\n";
}

// What tasks that differ in a number say together.
std::string group_section(const Comparison& c, const TaskGroup& group, size_t number) {
  const std::string figures = figure(difficulty_chart(c, group)) + figure(state_chart(c, group));
  std::vector<std::string> names, keys{"`" + group.key + "`"};
  for (const TaskSummary* t : group.tasks) names.push_back(t->task->name);
  for (const std::string& key : group.with) keys.push_back("`" + key + "`");
  const std::vector<std::string> also = also_different(c, group);
  const std::string how = keys.size() > 1 ? ", which grow together" : also.empty() ? " alone" : "";
  const std::string caution =
      also.empty() ? ""
                   : str(" Runs on them also differ in ", list_of(also),
                         ", so that a line shows more than the effect of ", list_of(keys), ".");
  return element("section", "task",
                 element(str("h2 id=\"across-", number, "\""), "",
                         escape(capitalized(shown_metric(group)) + " against " + group.key)) +
                     element("p", "soft",
                             rich("The tasks " + list_of(names) + " differ in " + list_of(keys) +
                                  how + "." + caution)) +
                     element("div", "figures", figures)) +
         "\n";
}

// The sizes of one task together.
std::string scaling_section(const Comparison& c, const SizeSeries& series, size_t number) {
  const auto lines = scaling_table(series);
  std::string head, body;
  for (const std::string& title : lines[0]) {
    head += element("th scope=\"col\"", title == "model" ? "model" : "", escape(title));
  }
  for (size_t i = 1; i < lines.size(); ++i) {
    std::string line =
        element("th scope=\"row\"", "model", element("code", "", escape(lines[i][0])));
    for (size_t j = 1; j < lines[i].size(); ++j) {
      line += element("td data-label=\"" + escape(lines[0][j]) + "\"", "", escape(lines[i][j]));
    }
    body += element("tr", "", line) + "\n";
  }
  const std::string caption = "Scaling laws on " + series.name;
  return element("section", "task",
                 element(str("h2 id=\"scaling-", number, "\""), "",
                         escape("Scaling on " + series.name)) +
                     scrolling_table(caption, "results", escape(caption), head, body) +
                     element("div", "figures", figure(scaling_chart(c, series)))) +
         "\n";
}

std::string fold(const std::string& title, const std::string& note, const std::string& content) {
  const std::string aside = note.empty() ? "" : " " + element("span", "soft", rich(note));
  return "<details>" + element("summary", "", escape(title) + aside) + content + "</details>\n";
}

std::string state_text(const Run* run) {
  if (!run) return "not started";
  if (run_failed(*run)) return "failed: " + run_problem(*run);
  if (run_diverged(*run)) return "finished, diverged";
  if (run->interruption) return "interrupted " + interruption_text(*run->interruption);
  return run->state == RunState::kFinished ? "finished" : "running";
}

// A dash stays a dash.
std::string with_unit(const std::string& number, const std::string& unit) {
  return number == kDash ? number : number + " " + unit;
}

// A relative path as the address of a link; "./" keeps a name with a colon from being a protocol.
std::string path_link(const std::string& folder) {
  std::string out = "./";
  for (const char c : folder) {
    if (c == '%' || c == '?' || c == '#' || c == ' ') {
      out += percent_encoded(c);
    } else {
      out += c;
    }
  }
  return out + "/";
}

// A row of the table of all runs for each model and seed of `t`. `note` stands after the models.
std::string run_rows(const Comparison& c, const TaskSummary& t, const std::string& note) {
  std::string body;
  for (const Row& row : t.rows) {
    for (const int64_t seed : c.seeds) {
      const auto found = std::find_if(row.runs.begin(), row.runs.end(),
                                      [&](const Run* run) { return run->seed == seed; });
      const Run* run = found == row.runs.end() ? nullptr : *found;
      const Point p = run && !run->points.empty() ? run->points.back()
                                                  : Point{.tokens = kUnknown, .seconds = kUnknown};
      std::string seed_cell = str(seed);
      if (run && !run->folder.empty()) {
        seed_cell = "<a href=\"" + escape(path_link(run->folder)) + "\">" + seed_cell + "</a>";
      }
      std::string line =
          element("th scope=\"row\"", "left", escape(t.task->name)) +
          element("td", "left", element("code", "", escape(row.model->label)) + escape(note)) +
          element("td", "", seed_cell);
      for (const std::string& text :
           {metric_text(*t.task, p.quality), fixed(p.loss, 3), fixed(p.train_loss, 3),
            run && !run->points.empty() ? str(p.step) : std::string(kDash),
            with_unit(count(p.tokens), t.task->unit), duration(p.seconds),
            with_unit(
                grouped(run && run->tokens_per_second > 0 ? run->tokens_per_second : kUnknown),
                t.task->unit + "/s"),
            bytes(run ? run->peak_memory_bytes : kUnknown)}) {
        line += element("td", "", text);
      }
      line += element("td",
                      run && run_failed(*run)    ? "left wrap failed"
                      : run && run->interruption ? "left wrap"
                                                 : "left",
                      escape(state_text(run)));
      body += element("tr", "", line) + "\n";
    }
  }
  return body;
}

std::string every_run(const Comparison& c, const Summary& summary) {
  std::string body;
  for (const TaskSummary& t : summary.tasks) {
    body += run_rows(c, t, "");
    for (const TaskSummary& again : t.robustness) {
      body += run_rows(c, again, ", second initialisation");
    }
  }
  std::string head =
      element("th scope=\"col\"", "left", "task") + element("th scope=\"col\"", "left", "model");
  for (const char* title : {"seed", "metric", "loss", "training loss", "steps", "data", "time",
                            "speed", "peak memory"}) {
    head += element("th scope=\"col\"", "", title);
  }
  head += element("th scope=\"col\"", "left", "state");
  return scrolling_table("Every run", "",
                         "Values at each run's last evaluation; losses in nats a target.", head,
                         body);
}

std::string model_configs(const Comparison& c) {
  std::string out;
  for (const ModelInfo& model : c.models) {
    std::string inner;
    if (!model.source.empty()) inner += element("p", "soft small", "Source: " + rich(model.source));
    for (const Build& build : c.builds) {
      if (build.model != model.label) continue;
      std::string facts = "On " + build.task;
      if (build.parameters >= 0)
        facts += ", " + grouped(static_cast<double>(build.parameters)) + " parameters";
      if (build.mechanism_share > 0) {
        facts += "; the mechanism adds " + percent(build.mechanism_share) +
                 " to the forward FLOPs of plain attention's model";
      }
      inner += element("p", "small", escape(facts) + ".");
      if (!build.config.empty()) inner += element("pre", "", escape(build.config));
    }
    if (!inner.empty()) out += fold("Model " + model.label, model.description, inner);
  }
  return out;
}

// `machine`: whether the page names the one on which speed was measured.
std::string notes(const Summary& summary, bool machine) {
  return "<p>Every model trains on the same data in the same order for a given seed. The result is "
         "the metric on held-out data at the last evaluation. Models are compared by the "
         "differences of their results, one a seed (a paired t test). The <b>95% interval</b> also "
         "holds the sampling error of the held-out data, which is the same for all seeds and does "
         "not shrink with more of them. It is that of the difference on the same parts of the "
         "data, "
         "so that what is hard for both models cancels. Runs that have not recorded these parts "
         "are "
         "taken to err independently, which rather makes the interval too wide.</p>"
         "<p>A model is called <b>better</b> or <b>worse</b> than the baseline only when at least "
         "five seeds are paired and the test finds a difference after Holm's procedure over " +
         (summary.tested == 1  ? "the one test"
          : summary.tested > 0 ? str("all ", summary.tested, " tests")
                               : "the tests") +
         " of this report" + (summary.tested > 0 ? "" : " (there are none yet)") +
         ", which keeps the probability of one or more false statements at 5% "
         "or less. With unequal parameters or data (by more than 1%), other training options, a "
         "choice at the edge of its sweep, a diverged run of either model or a failed run of the "
         "better one it is only "
         "<b>ahead</b> or <b>behind</b>. <b>No difference found</b> does not mean that there is "
         "none: the interval says how large it may still be. An interval is that of one difference "
         "by itself. "
         "Among many tests one may miss zero by chance, which Holm's procedure allows for.</p>"
         "<p>A model is <b>not shown to have learned</b> when its mean does not pass the task's "
         "best floor, "
         "what can be reached without learning, by the same test. Nothing else is said of it. "
         "Where its mean passes, but there are fewer than five seeds and the test does not carry "
         "it, it is <b>not known</b> whether it has learned. A "
         "curve is <b>still falling</b> (or rising) when the metric has improved by more than 1% "
         "of "
         "its value, or by more than one point of a percentage, over the last quarter of the "
         "steps; otherwise it is <b>on a plateau</b>.</p>"
         "<p>A <b>scaling law</b> is fitted by least squares to the mean losses of a task's sizes. "
         "What a model's compute is worth is the factor by which the baseline needs more of it for "
         "the same loss, by the fits. The intervals come from resampling the seeds of every size, "
         "the same for all models. They are not among the tests of this report, and they do not "
         "hold what the form of the law gets wrong.</p>"
         "<p><b>Speed</b> " +
         (machine ? "is measured on the machine below and depends on what else it was doing. "
                  : "depends on the machine and on what else it was doing. ") +
         "<b>State</b> is the memory that decoding keeps: what each token of context adds to it, "
         "and "
         "what it is for a whole sequence of the task.</p>"
         "<p>Pointing at a <b>figure</b> shows the values there. By keyboard, Tab goes from line "
         "to line and the arrow keys go along a line. A small triangle at the upper or lower edge "
         "of a figure stands where a line leaves it.</p>";
}

std::string more(const Comparison& c, const Summary& summary) {
  std::string out = element("h2 id=\"how\"", "", "How this was made");
  if (!c.command.empty()) out += element("pre", "", escape(c.command)) + "\n";
  std::string machine;
  for (const auto& [key, value] : c.machine) {
    machine += element("dt", "", escape(key)) + element("dd", "", escape(value));
  }
  out += element("h3 id=\"reading\"", "", "How to read it") + notes(summary, !machine.empty());
  if (!machine.empty())
    out += element("h3", "", "Machine") + element("dl", "", machine) + "<p></p>\n";
  out += fold("Every run",
              str(summary.finished, " finished, ", summary.failed, " failed, ", summary.planned,
                  " planned"),
              every_run(c, summary));
  if (!c.config.empty()) {
    out += fold("Configuration", "complete, defaults written out",
                element("pre", "", escape(c.config)));
  }
  out += model_configs(c);
  return element("section", "more", out) + "\n";
}

}  // namespace

std::string to_html(const Comparison& c) {
  const Summary summary = summarize(c);
  const std::string title = c.title.empty() ? "Comparison" : c.title;
  std::string head = "<p class=\"eyebrow\"><b>Headloom</b> comparison";
  if (!c.date.empty()) head += " · " + escape(c.date);
  head += " · " + counted(std::ssize(c.models), "model") + " · " +
          counted(std::ssize(c.tasks), "task") + " · " + counted(std::ssize(c.seeds), "seed") +
          "</p>\n" + element("h1", "", escape(title)) + "\n";
  if (!c.budget.empty()) head += element("p", "soft", rich(c.budget)) + "\n";
  if (!summary.progress.empty()) {
    std::string banner = escape(summary.progress);
    if (!summary.go_on.empty()) {
      banner += " Go on with: " + element("code", "", escape(summary.go_on));
    }
    head += "<p class=\"banner\" role=\"status\">" + banner + "</p>\n";
  }
  std::string answers, sections;
  const std::vector<TaskGroup> groups = task_groups(summary);
  const std::vector<SizeSeries> scaling = size_series(c, summary);
  for (size_t i = 0; i < scaling.size(); ++i) {
    answers += element("p", "", rich(scaling[i].answer)) + "\n";
    sections += scaling_section(c, scaling[i], i + 1);
  }
  for (size_t i = 0; i < groups.size(); ++i) sections += group_section(c, groups[i], i + 1);
  for (const TaskSummary& t : summary.tasks) {
    answers += element("p", "", rich(t.answer)) + "\n";
    if (!t.recommendation.empty()) {
      answers += element("p", "advice", rich(t.recommendation)) + "\n";
    }
    sections += task_section(c, t);
  }
  if (answers.empty()) answers = element("p", "", "Nothing was compared: no task is configured.");
  return "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
         "<meta name=\"color-scheme\" content=\"light dark\">\n" +
         element("title", "", escape(title)) + "\n<style>" + kStyle +
         "</style>\n</head>\n<body>\n<main>\n" + element("header", "", head) +
         "<div class=\"answer\">\n" +
         (summary.limits.empty() ? "" : element("p", "limits", rich(summary.limits))) + answers +
         "</div>\n" + contents(c, groups, scaling) + sections + more(c, summary) +
         "</main>\n<footer>Written by Headloom. This page is one file and fetches "
         "nothing.</footer>\n</body>\n</html>\n";
}

}  // namespace headloom::report
