#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>

#include "report/across.h"
#include "report/charts.h"
#include "report/summary.h"
#include "report/synthetic.h"

namespace headloom::report::pages_test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

// Checks that tags nest and close and that attribute values are quoted; returns the first fault.
std::string markup_fault(const std::string& html) {
  std::vector<std::string> open;
  for (size_t i = 0; i < html.size(); ++i) {
    if (html[i] != '<') continue;
    if (html.compare(i, 2, "<!") == 0) continue;
    size_t end = i + 1;
    bool quoted = false;
    while (end < html.size() && (quoted || html[end] != '>')) {
      if (html[end] == '<') return "'<' inside a tag: " + html.substr(i, 60);
      quoted ^= html[end++] == '"';
    }
    if (end == html.size()) return "tag without end: " + html.substr(i, 60);
    const std::string tag = html.substr(i + 1, end - i - 1);
    const std::string name =
        tag.substr(tag[0] == '/', tag.find_first_of(" /", 1) - (tag[0] == '/'));
    if (tag[0] == '/') {
      if (open.empty() || open.back() != name) {
        return "</" + name + "> closes " + (open.empty() ? "nothing" : open.back());
      }
      open.pop_back();
    } else if (tag.back() != '/' && name != "meta") {
      open.push_back(name);
      if (name == "style") i = html.find("</style>", end) - 1, end = i;
    }
    i = end;
  }
  return open.empty() ? "" : "never closed: " + open.back();
}

std::map<std::string, Comparison> pages() {
  std::map<std::string, Comparison> out;
  out["quickstart"] = quickstart();

  Comparison& progress = out["progress"] = quickstart();
  std::erase_if(progress.runs, [](const auto& r) {
    return r.seed == 3 || (r.seed == 2 && r.task == "find_block") || r.model == "multi_token";
  });
  progress.runs.back().state = RunState::kRunning;
  progress.runs.back().points.resize(9);

  Comparison& failed = out["failed"] = quickstart();
  for (auto& run : failed.runs) {
    if (run.model == "multi_token" && run.task == "text") {
      run.state = RunState::kFailed;
      run.problem = "diverged at step 600: the loss became nan";
      run.points.resize(13);
      run.points.back().loss = run.points.back().quality = kNan;
    }
    if (run.model == "dcmha" && run.seed == 2) run.points.back().quality = kInf;
  }

  Comparison& many = out["many"] = quickstart();
  many.tasks.resize(1);
  for (int i = 0; i < 7; ++i) {
    const std::string label =
        "variant_" + std::to_string(i) + (i == 3 ? "_with_a_very_long_name" : "");
    many.models.push_back({label, "another", ""});
    for (const int64_t seed : many.seeds) {
      many.runs.push_back(make_run(label, "text", seed, {1.9 + 0.008 * i, .004, 1.0 - 0.09 * i}));
    }
  }

  Comparison& experts = out["experts"] = quickstart();
  for (auto& run : experts.runs) {
    if (run.model != "multi_token") continue;
    for (Point& p : run.points) {
      for (int64_t layer = 1; layer < 12; ++layer) {
        for (int i = 0; i < 16; ++i) {
          p.expert_load[layer].push_back((i + 1.0 + static_cast<double>(run.seed % 3)) / 136);
        }
      }
    }
  }

  out["swept"] = swept();
  out["lengths"] = lengths();

  out["nothing"] = quickstart();
  out["nothing"].runs.clear();
  out["empty"] = {};
  out["single"] = small({{"mha", {1.9}}});
  out["single"].runs[0].points.clear();

  Comparison& hostile = out["hostile"] =
      small({{"<script>alert('x')</script>", {1.9, 1.8}}, {"a&b \"q\" `t", {1.7, 1.6}}});
  hostile.title = "</title><script>";
  hostile.tasks[0].description = "1 < 2 & \x01 \"quotes\"";
  hostile.config = hostile.command = "</pre><b>";
  return out;
}

class Page : public testing::TestWithParam<std::string> {
 protected:
  std::string html = to_html(pages().at(GetParam()));
};

TEST_P(Page, IsWellFormed) { EXPECT_EQ(markup_fault(html), ""); }

TEST_P(Page, FetchesNothing) {
  std::string rest = html;
  const std::string allowed = "xmlns=\"http://www.w3.org/2000/svg\"";
  for (size_t at; (at = rest.find(allowed)) != std::string::npos;) rest.erase(at, allowed.size());
  for (const char* word : {"http:", "https:", "//cdn", "<script", "<link", "<img", "<iframe",
                           "@import", "@font-face", " src="}) {
    EXPECT_EQ(rest.find(word), std::string::npos) << word;
  }
  // Links lead to places of the page, to content that they hold themselves, or to folders beside
  // it.
  const std::string href = " href=\"";
  for (size_t at = 0; (at = rest.find(href, at)) != std::string::npos;) {
    at += href.size();
    const std::string to = rest.substr(at, 5);
    EXPECT_TRUE(to.starts_with("#") || to.starts_with("data:") || to.starts_with("./")) << to;
  }
}

TEST_P(Page, DrawsNoNumberThatIsNotFinite) {
  for (size_t at = 0; (at = html.find("<svg", at)) != std::string::npos; ++at) {
    const std::string svg = html.substr(at, html.find("</svg>", at) - at);
    for (const char* attribute :
         {" d=\"", " x=\"", " y=\"", " cx=\"", " cy=\"", " width=\"", " r=\""}) {
      for (size_t a = 0; (a = svg.find(attribute, a)) != std::string::npos; ++a) {
        const size_t from = a + std::string(attribute).size();
        const std::string value = svg.substr(from, svg.find('"', from) - from);
        EXPECT_EQ(value.find_first_not_of("0123456789.-+ MLlhmZ"), std::string::npos) << value;
      }
    }
  }
}

TEST_P(Page, NamesItsCharts) {
  for (size_t at = 0; (at = html.find("<svg", at)) != std::string::npos; ++at) {
    const std::string svg = html.substr(at, html.find("</svg>", at) - at);
    if (svg.find("aria-hidden") != std::string::npos) continue;
    EXPECT_NE(svg.find("<title"), std::string::npos) << svg.substr(0, 200);
  }
}

TEST_P(Page, IdsAreUnique) {
  std::map<std::string, int> seen;
  for (size_t at = 0; (at = html.find(" id=\"", at)) != std::string::npos; ++at) {
    const std::string id = html.substr(at + 5, html.find('"', at + 5) - at - 5);
    EXPECT_EQ(++seen[id], 1) << id;
  }
}

// Set HEADLOOM_REPORT_PAGES to a folder to keep the pages and look at them.
TEST_P(Page, CanBeWritten) {
  const char* keep = std::getenv("HEADLOOM_REPORT_PAGES");
  const std::filesystem::path folder = keep ? keep : testing::TempDir();
  std::filesystem::create_directories(folder);
  const std::filesystem::path path = folder / ("headloom_report_" + GetParam() + ".html");
  std::ofstream(path) << html;
  EXPECT_EQ(std::filesystem::file_size(path), html.size());
  if (!keep) std::filesystem::remove(path);
}

INSTANTIATE_TEST_SUITE_P(All, Page,
                         testing::Values("quickstart", "progress", "failed", "many", "experts",
                                         "swept", "lengths", "nothing", "empty", "single",
                                         "hostile"),
                         [](const auto& info) { return info.param; });

TEST(Report, EscapesLabels) {
  const std::string html = to_html(pages().at("hostile"));
  EXPECT_NE(html.find("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;"), std::string::npos);
  EXPECT_NE(html.find("<title>&lt;/title&gt;&lt;script&gt;</title>"), std::string::npos);
  EXPECT_EQ(html.find('\x01'), std::string::npos);
}

TEST(Report, ShowsFailedAndMissingRuns) {
  const std::string failed = to_html(pages().at("failed"));
  EXPECT_NE(failed.find("diverged at step 600: the loss became nan"), std::string::npos);
  EXPECT_NE(failed.find("Every run of <code>multi_token</code> failed."), std::string::npos);
  EXPECT_NE(failed.find("the last evaluation gave inf, which is not finite"), std::string::npos);
  const std::string progress = to_html(pages().at("progress"));
  EXPECT_NE(progress.find("In progress: "), std::string::npos);
  EXPECT_NE(progress.find("not started"), std::string::npos);
  const std::string nothing = to_html(pages().at("nothing"));
  EXPECT_NE(nothing.find("In progress: 0 of 50 runs have finished"), std::string::npos);
  EXPECT_EQ(nothing.find("<figure"), std::string::npos);
  EXPECT_NE(to_html(pages().at("single")).find("On text, no run gave a result."),
            std::string::npos);
  EXPECT_NE(nothing.find("On text, no run has finished yet."), std::string::npos);
}

TEST(Report, SaysWhereARunWasInterruptedAndHowItGoesOn) {
  Comparison c = pages().at("progress");
  report::Run& run = c.runs.back();
  run.interruption = {
      .step = 137, .steps = 400, .saved_step = 100, .go_on = "headloom train 'a b' --resume"};
  const std::string where = "after step 137 of 400; step 100 is saved. Go on with:";
  for (const std::string& said : {to_text(c), to_html(c)}) {
    EXPECT_NE(said.find("Interrupted: "), std::string::npos);
    EXPECT_NE(said.find(", 1 was interrupted"), std::string::npos);
    EXPECT_NE(said.find(where), std::string::npos);
    EXPECT_EQ(said.find("under way"), std::string::npos);
  }
  EXPECT_NE(to_html(c).find(where + " <code>headloom train &#39;a b&#39; --resume</code></li>"),
            std::string::npos);
  EXPECT_NE(to_text(c, 40).find("\n    headloom train 'a b' --resume\n"), std::string::npos);
  EXPECT_NE(to_json(c).find("\"state\": \"interrupted\""), std::string::npos);
  EXPECT_EQ(to_json(c).find("\"state\": \"running\""), std::string::npos);
  run.interruption->saved_step.reset();
  EXPECT_NE(to_html(c).find("; nothing is saved, so it begins anew."), std::string::npos);
}

TEST(Report, DrawsTheLoadOfModelsWithExperts) {
  const std::string html = to_html(pages().at("experts"));
  size_t count = 0;
  for (size_t at = 0; (at = html.find("\">Expert load of multi_token on", at)) != std::string::npos;
       ++at) {
    ++count;
  }
  EXPECT_EQ(count, quickstart().tasks.size());
  EXPECT_NE(html.find("One layer of 2 is shown."), std::string::npos);
  EXPECT_NE(to_json(pages().at("experts")).find("\"expert_load\""), std::string::npos);
  EXPECT_EQ(to_html(quickstart()).find("Expert load"), std::string::npos);
  EXPECT_EQ(to_json(quickstart()).find("expert_load"), std::string::npos);
}

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++count;
  return count;
}

TEST(Report, DrawsTheSweepsWithWhatWasChosen) {
  const std::string html = to_html(swept());
  // Each key on each task has a figure with a curve and a mark for every model.
  EXPECT_EQ(count_of(html, " on validation data against lr on text</title>"), 1u);
  EXPECT_EQ(count_of(html, " on validation data against norm on find_block</title>"), 1u);
  EXPECT_EQ(count_of(html, ": lr = 0.004 was chosen"), 8u);
  EXPECT_EQ(count_of(html, "lr = 0.008 was chosen, at the edge of what was tried"), 2u);
  EXPECT_NE(html.find("the best value of the sweep is at its edge for <code>differential</code> on "
                      "all tasks"),
            std::string::npos);
  // A setting is not drawn by what is left of its seeds.
  Comparison failing = swept();
  const auto run = std::find_if(failing.runs.begin(), failing.runs.end(), [](const auto& r) {
    return r.sweep && r.task == "text" && r.setting[0].value == "0.0005";
  });
  run->state = RunState::kFailed;
  const std::string with_failed = to_html(failing);
  EXPECT_EQ(count_of(with_failed, "1 setting with failed runs is not drawn."), 2u);
  EXPECT_EQ(count_of(html, "is not drawn"), 0u);
  // The runs of the sweep are no results.
  const Summary summary = summarize(swept());
  EXPECT_EQ(summary.planned, 50);
  EXPECT_EQ(summary.finished, 50);
  EXPECT_EQ(to_html(quickstart()).find("validation data against"), std::string::npos);
}

TEST(Report, DrawsQualityAgainstEveryCost) {
  const std::string html = to_html(swept());
  for (const char* cost :
       {"training tokens a second", "decoding tokens a second", "bytes of state a sequence"}) {
    EXPECT_EQ(count_of(html, " against " + std::string(cost) + " on text</title>"), 1u) << cost;
  }
  EXPECT_EQ(to_html(quickstart()).find("decoding tokens a second"), std::string::npos);
  // No ratio of speeds without a range.
  EXPECT_EQ(to_text(swept()).find("times its speed"), std::string::npos);
}

// The rows of a figure's CSV file, by the beginning of its name.
std::vector<std::string> csv_of(const Data& data) {
  std::vector<std::string> rows;
  std::istringstream lines(to_csv(data));
  for (std::string line; std::getline(lines, line);) rows.push_back(line);
  return rows;
}

TEST(Report, DrawsAccuracyAgainstTheNumberInWhichTasksDiffer) {
  const Comparison c = lengths();
  const Summary summary = summarize(c);
  const std::vector<TaskGroup> groups = task_groups(summary);
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(groups[0].key, "length");
  EXPECT_TRUE(groups[0].with.empty());
  EXPECT_EQ(groups[0].values, (std::vector<double>{64, 128, 256, 512}));
  const Chart chart = difficulty_chart(c, groups[0]);
  EXPECT_EQ(chart.drawings.size(), 2u) << "accuracies and differences";
  const std::vector<std::string> rows = csv_of(chart.data);
  EXPECT_EQ(rows[0], "model,length,accuracy,low,high,difference,difference low,difference high");
  // Means of 0.91 ... 0.95 and 0.66 ... 0.70; t = 2.776, s = 0.0158. Every seed differs by 0.25.
  EXPECT_EQ(rows[3], "mha,256,0.93,0.9103676,0.9496324,,,");
  EXPECT_EQ(rows[7], "window,256,0.68,0.6603676,0.6996324,-0.25,-0.25,-0.25");
  EXPECT_EQ(rows[13], "any token,64,0.001,,,,,");
  EXPECT_EQ(rows.size(), 1u + 3 * 4 + 2 * 4);
  const std::string html = to_html(c);
  EXPECT_EQ(count_of(html, "class=\"floor\" d="), 2u) << "a line for each floor";
  EXPECT_NE(html.find("<a href=\"#across-1\">Length of tasks</a>"), std::string::npos);
  EXPECT_NE(html.find("mqar-512 differ in <code>length</code> alone."), std::string::npos);
  EXPECT_NE(html.find("aria-label=\"window at length 512: 58.0% (56.0% to 60.0%)\""),
            std::string::npos);
  EXPECT_NE(html.find("aria-label=\"window at length 512: −35.00 points\""), std::string::npos);
}

TEST(Report, GroupsTasksByOneNumberOrByNumbersThatGrowTogether) {
  const auto groups = [](const std::vector<Setting>& options) {
    Comparison c;
    c.models = {{"mha", "", ""}};
    c.seeds = {1};
    for (size_t i = 0; i < options.size(); ++i) {
      c.tasks.push_back({.name = std::string(1, static_cast<char>('a' + i)),
                         .metric = "error rate",
                         .percent = true,
                         .options = options[i]});
      c.runs.push_back(plain_run("mha", c.tasks.back().name, 1, 0.5));
    }
    const Summary summary = summarize(c);
    std::vector<std::string> out;
    for (const TaskGroup& group : task_groups(summary)) {
      out.push_back(group.key + (group.with.empty() ? "" : "+" + group.with[0]) + ":");
      for (const TaskSummary* t : group.tasks) out.back() += " " + t->task->name;
    }
    return out;
  };
  using Names = std::vector<std::string>;
  const auto task = [](const char* type, const char* length, const char* pairs,
                       const char* held_out = "9") {
    return Setting{
        {"type", type}, {"length", length}, {"pairs", pairs}, {"eval_sequences", held_out}};
  };
  EXPECT_EQ(groups({task("mqar", "128", "4"), task("mqar", "64", "4", "7")}), Names{"length: b a"});
  EXPECT_EQ(groups({task("mqar", "64", "4"), task("mqar", "128", "8")}),
            Names{"length+pairs: a b"});
  EXPECT_EQ(groups({task("mqar", "64", "8"), task("mqar", "128", "4")}), Names{})
      << "one is longer, the other has more pairs";
  EXPECT_EQ(groups({task("mqar", "64", "4"), task("mqar", "128", "4"), task("mqar", "64", "8"),
                    task("mqar", "128", "8")}),
            (Names{"length: a b", "length: c d", "pairs: a c", "pairs: b d"}));
  EXPECT_EQ(groups({task("mqar", "64", "4"), task("copy", "128", "4")}), Names{});
  EXPECT_EQ(groups({task("mqar", "64", "4"), task("mqar", "64", "4", "7")}), Names{});
  EXPECT_EQ(groups({{}, {}}), Names{}) << "nothing is known of the tasks";
}

TEST(Report, GroupsNoTasksWhereEveryModelHasAResultOnOneAlone) {
  Comparison c = lengths();
  c.planned = false;
  std::erase_if(c.runs, [](const auto& run) {
    return run.task != (run.model == "mha" ? "mqar-64" : "mqar-128");
  });
  EXPECT_TRUE(task_groups(summarize(c)).empty());
  EXPECT_EQ(to_html(c).find("Accuracy against length"), std::string::npos);
  c.runs.push_back(plain_run("mha", "mqar-256", 1, 0.5));
  const Summary summary = summarize(c);
  EXPECT_EQ(task_groups(summary).size(), 1u);
  EXPECT_NE(to_html(c).find("Accuracy against length"), std::string::npos);
}

TEST(Report, DrawsNoCurveOfASingleEvaluation) {
  const auto captions = [](const Comparison& c) {
    const std::string html = to_html(c);
    std::vector<std::string> found;
    for (const char* const caption :
         {"on held-out data against training tokens", "on held-out data against training FLOPs",
          "on held-out data against training time", "</b> in error rate at the same number of"}) {
      if (html.find(caption) != std::string::npos) found.push_back(caption);
    }
    return found;
  };
  Comparison c = lengths();
  for (Build& build : c.builds) build.flops_per_unit = 1e6;
  EXPECT_EQ(captions(c).size(), 4u);
  const Comparison before = c;
  for (auto& run : c.runs) run.points.erase(run.points.begin());
  EXPECT_EQ(captions(c), std::vector<std::string>{});
  EXPECT_NE(to_html(c).find("against what it costs"), std::string::npos) << "which has points";
  // One model with two evaluations makes a curve; a difference takes two models.
  for (size_t i = 0; i < c.runs.size(); ++i) {
    if (c.runs[i].model == "window") c.runs[i] = before.runs[i];
  }
  EXPECT_EQ(captions(c).size(), 3u);
}

TEST(Report, SpeaksOfAFloorOnlyWhereOneIsDrawn) {
  Comparison c = small({{"mha", {1.9, 1.8}}, {"dcmha", {1.6, 1.5}}});
  for (Build& build : c.builds) build.state_bytes = 4096;
  const auto says = [&](double floor) {
    c.tasks[0].floors = {{"a guess", floor}};
    return cost_chart(c, summarize(c).tasks[0]).caption.find("Dotted") != std::string::npos;
  };
  EXPECT_TRUE(says(1.7));
  EXPECT_FALSE(says(9));
  // Of two, the one that models are judged by.
  c.tasks[0].floors = {{"any token", 1.7}, {"a token that was shown", 0.5}};
  const std::string caption = cost_chart(c, summarize(c).tasks[0]).caption;
  EXPECT_NE(
      caption.find("Dotted: what can be reached without learning, by any token. The best that "
                   "can be reached without learning, by a token that was shown, is outside of "
                   "the figure, at 0.500."),
      std::string::npos)
      << caption;
}

TEST(Report, AShareHasNoNumbersBeyondOne) {
  Comparison c = lengths();
  for (Build& build : c.builds) build.state_bytes = 4096;
  for (auto& run : c.runs)
    run.points.back().quality = 0.97 + 0.01 * static_cast<double>(run.seed % 4);
  const std::string html = to_html(c);
  EXPECT_NE(html.find(">100%</text>"), std::string::npos);
  for (const char* beyond : {">102%</text>", ">104%</text>", ">105%</text>", ">110%</text>"}) {
    EXPECT_EQ(html.find(beyond), std::string::npos) << beyond;
  }
}

TEST(Report, LongNamesOfFloorsEndWithinTheirFigure) {
  Comparison c = lengths();
  const std::string name(200, 'x');
  for (TaskInfo& task : c.tasks) task.floors = {{name, 0.5}};
  const Chart chart = accuracy_chart(c, summarize(c).tasks[0]);
  ASSERT_EQ(chart.drawings.size(), 1u);
  EXPECT_EQ(chart.drawings[0].find(name), std::string::npos);
  EXPECT_NE(chart.drawings[0].find("xx…xx"), std::string::npos);
}

TEST(Report, SaysInWhatElseRunsOfAGroupDiffer) {
  Comparison c = lengths();
  const auto said = [&] {
    const std::string html = to_html(c);
    const size_t at = html.find(" differ in <code>length</code>");
    return html.substr(at, html.find("</p>", at) - at);
  };
  const auto set = [&](const std::string& task, const Setting& conditions, int64_t steps) {
    for (Build& build : c.builds) {
      if (build.task == task) build.conditions = conditions;
    }
    for (auto& run : c.runs) {
      if (run.task != task) continue;
      run.points.back().step = steps;
      run.points.back().tokens = 100.0 * static_cast<double>(steps);
    }
  };
  for (const TaskInfo& task : c.tasks) set(task.name, {{"batch", "8"}, {"lr", "0.1"}}, 1000);
  EXPECT_EQ(said(), " differ in <code>length</code> alone.");
  set(c.tasks[1].name, {{"batch", "8"}, {"lr", "0.2"}}, 1010);
  c.swept = {"lr"};
  EXPECT_EQ(said(), " differ in <code>length</code> alone.") << "what was swept, and whole steps";
  set(c.tasks[2].name, {{"batch", "4"}, {"clip", "1"}, {"lr", "0.1"}}, 1000);
  EXPECT_EQ(said(),
            " differ in <code>length</code>. Runs on them also differ in <code>batch</code> and "
            "<code>clip</code>, so that a line shows more than the effect of <code>length</code>.");
  set(c.tasks[2].name, {{"batch", "8"}, {"lr", "0.1"}}, 2000);
  EXPECT_EQ(said(),
            " differ in <code>length</code>. Runs on them also differ in the tokens of training "
            "(100k to 200k), so that a line shows more than the effect of <code>length</code>.");
  for (auto& run : c.runs) {
    if (run.task == c.tasks[2].name) run.points.back().step = 1000;
  }
  set(c.tasks[1].name, {{"batch", "8"}, {"lr", "0.1"}}, 1000);
  EXPECT_EQ(said(), " differ in <code>length</code> alone.") << "longer sequences, as many of them";
}

TEST(Report, DrawsAccuracyAgainstTheWholeState) {
  const Comparison c = lengths();
  const Summary summary = summarize(c);
  const Chart chart = state_chart(c, task_groups(summary)[0]);
  const std::vector<std::string> rows = csv_of(chart.data);
  EXPECT_EQ(rows[0], "model,task,length,state bytes,accuracy,low,high");
  EXPECT_EQ(rows[3], "mha,mqar-256,256,131072,0.93,0.9103676,0.9496324");
  EXPECT_EQ(rows[8], "window,mqar-512,512,65536,0.58,0.5603676,0.5996324");
  EXPECT_EQ(rows[12], "mamba,mqar-512,512,8192,0.58,0.5603676,0.5996324");
  const std::string html = to_html(c);
  EXPECT_NE(html.find("mamba on mqar-64: 88.0% (86.0% to 90.0%), 8.0 KiB of state"),
            std::string::npos);
}

TEST(Report, TheGapIsPairedBySeedAndEndsAtTheVerdict) {
  const Comparison c = lengths();
  const Summary summary = summarize(c);
  const Chart chart = gap_chart(c, summary.tasks[1]);
  const std::vector<std::string> rows = csv_of(chart.data);
  // Every seed differs by as much, so that the interval is a point, however wide the seeds scatter.
  EXPECT_EQ(rows[1], "window,100000,0,0,0");
  EXPECT_EQ(rows[2], "window,200000,0.15,0.15,0.15");
  Comparison noisy = quickstart();
  for (const TaskSummary& t : summarize(noisy).tasks) {
    const std::vector<std::string> lines = csv_of(gap_chart(noisy, t).data);
    for (const Row& row : t.rows) {
      if (row.baseline) continue;
      const Estimate& d = row.against_baseline.difference;
      char end[100];
      std::snprintf(end, sizeof end, "%s,2400000,%.7g,%.7g,%.7g", row.model->label.c_str(), d.mean,
                    d.low(), d.high());
      EXPECT_EQ(std::count(lines.begin(), lines.end(), end), 1) << end;
    }
  }
  // A seed that one of the two has not finished is left out at every evaluation.
  std::erase_if(noisy.runs, [](const auto& r) { return r.model == "mha" && r.seed == 3; });
  for (const auto& [model, task] : {std::pair("dcmha", 0)}) {
    const Summary less = summarize(noisy);
    for (const Row& row : less.tasks[task].rows) {
      if (row.model->label != model) continue;
      EXPECT_EQ(row.against_baseline.difference.count, 4);
      const std::vector<std::string> lines = csv_of(gap_chart(noisy, less.tasks[task]).data);
      char end[100];
      std::snprintf(end, sizeof end, "%s,2400000,%.7g", model,
                    row.against_baseline.difference.mean);
      EXPECT_EQ(std::count_if(lines.begin(), lines.end(),
                              [&](const std::string& line) { return line.starts_with(end); }),
                1);
    }
  }
}

// Tab goes from line to line and the arrow keys along a line; every value has a name.
TEST(Report, EveryValueIsReachedByKeyboard) {
  const std::string html = to_html(swept());
  EXPECT_EQ(count_of(html, "<svg class=\"chart"),
            count_of(html, "<div class=\"plot\" role=\"group\""));
  std::map<std::string, int> groups;
  const std::string begin = "<input type=\"radio\" name=\"";
  for (size_t at = 0; (at = html.find(begin, at)) != std::string::npos;) {
    at += begin.size();
    ++groups[html.substr(at, html.find('"', at) - at)];
    const std::string rest = html.substr(at, html.find("/>", at) - at);
    EXPECT_NE(rest.find("aria-label=\""), std::string::npos) << rest;
    EXPECT_EQ(rest.find("aria-label=\"\""), std::string::npos) << rest;
  }
  // 25 evaluations of each of five models, of which those above the figure are one arrow.
  EXPECT_GT(groups.size(), 50u);
  for (const auto& [name, count] : groups) EXPECT_LE(count, 42) << name;
  EXPECT_EQ(html.find("<title>mha: "), html.find("<title>mha: 1.9")) << "only strips have titles";
  EXPECT_NE(html.find(".plot input:focus-visible"), std::string::npos);
}

TEST(Report, SaysWhatEndsRunsEarly) {
  Comparison c = lengths();
  EXPECT_EQ(to_text(c).find("validation data"), std::string::npos);
  c.tasks[0].stopping = "runs end once they reach an accuracy of 90.0% on validation data";
  EXPECT_NE(summarize(c).limits.find("; on mqar-64, runs end once they reach"), std::string::npos);
}

TEST(Report, SaysWhatLimitsSeveralTasksOnce) {
  Comparison c = swept();
  for (TaskInfo& task : c.tasks) task.stopping = "runs end early";
  for (Choice& choice : c.choices) choice.at_edge = {"lr"};
  const std::string limits = summarize(c).limits;
  EXPECT_NE(limits.find("; on all tasks, runs end early; "), std::string::npos) << limits;
  EXPECT_NE(limits.find("at its edge for all models on all tasks"), std::string::npos) << limits;
}

TEST(Report, SaysWhereNothingWasTested) {
  const std::string text = to_text(pages().at("nothing")), html = to_html(pages().at("nothing"));
  EXPECT_NE(text.find("nothing was tested."), std::string::npos);
  EXPECT_NE(html.find("there are none yet"), std::string::npos);
  for (const std::string& shown : {text, html}) {
    EXPECT_EQ(shown.find("all 0 tests"), std::string::npos);
  }
}

TEST(Report, NamesTheFloors) {
  const std::string html = to_html(swept());
  EXPECT_NE(html.find("class=\"note\">a guess among the blocks</text>"), std::string::npos);
  EXPECT_NE(html.find("class=\"floor\""), std::string::npos);
}

TEST(Report, FiguresCarryTheirNumbers) {
  const std::string html = to_html(swept());
  EXPECT_EQ(count_of(html, "href=\"data:text/csv"), count_of(html, "<figure"));
  EXPECT_EQ(count_of(html, "href=\"data:application/json"), count_of(html, "<figure"));
  const Data data{"a", {"model", "x"}, {{"m, \"1\"", "0.5"}, {"7", ""}}};
  EXPECT_EQ(to_csv(data), "model,x\n\"m, \"\"1\"\"\",0.5\n7,\n");
  EXPECT_EQ(to_json(data), R"([{"model":"m, \"1\"","x":0.5},{"model":"7","x":null}])");
}

TEST(Report, LinksTheFoldersOfRuns) {
  EXPECT_NE(to_html(swept()).find("<a href=\"./runs/mha%20text-1/\">1</a>"), std::string::npos);
}

TEST(Report, MarksWhatAFigureCutsOff) {
  // The untrained models lie far above the part of the figure that matters.
  EXPECT_NE(to_html(quickstart()).find(" begins above the figure, at "), std::string::npos);
}

TEST(Report, SaysWhereALineLeavesTheFigure) {
  const auto drawn = [](const std::vector<double>& values) {
    Line line{.label = "m"};
    for (size_t i = 0; i < values.size(); ++i)
      line.points.push_back({static_cast<double>(i), values[i]});
    return draw(LineChart{.title = "t",
                          .description = "d",
                          .x = make_axis("x", Unit::kPlain, 0, 4),
                          .y = make_axis("y", Unit::kPlain, -1, 1),
                          .lines = {line}});
  };
  for (const auto& [values, said] : std::vector<std::pair<std::vector<double>, std::string>>{
           {{3, 2, 0.5}, "m begins above the figure, at 3.000"},
           {{-3, -2, 0}, "m begins below the figure, at −3.000"},
           {{0, 2, 4}, "m goes above the figure, to 4.000"},
           {{0, -5, -2}, "m goes below the figure, to −5.000"},
           {{0, 2, 0}, "m goes above the figure, to 2.000"},
           {{3, 0.5, 2}, "m begins above the figure, at 3.000"},
           {{3, 0.5, 2}, "m goes above the figure, to 2.000"}}) {
    EXPECT_NE(drawn(values).find(said), std::string::npos) << said;
  }
}

TEST(Report, SaysWhereABandLeavesTheFigure) {
  const std::string svg =
      draw(LineChart{.title = "t",
                     .description = "d",
                     .x = make_axis("x", Unit::kPlain, 0, 4),
                     .y = make_axis("y", Unit::kPlain, -1, 1),
                     .lines = {{.label = "m",
                                .points = {{.x = 0, .y = 0.5, .low = 0.2, .high = 3},
                                           {.x = 1, .y = 0.4, .low = 0.3, .high = 0.5}}}}});
  EXPECT_NE(svg.find("the band of m reaches above the figure, to 3.000"), std::string::npos);
  EXPECT_EQ(svg.find("below the figure"), std::string::npos);
}

TEST(Report, ShortLogarithmicAxesHaveNumbers) {
  EXPECT_GE(make_axis("state", Unit::kCount, 2.5e6, 3.6e6, true).ticks().size(), 2u);
  EXPECT_EQ(make_axis("state", Unit::kCount, 1, 10, true).ticks(),
            (std::vector<double>{1, 2, 5, 10}));
}

TEST(Report, WhiskersEndWithTheAxis) {
  const auto whisker = [](double low, double high) {
    const std::string svg =
        draw(Scatter{.title = "t",
                     .description = "",
                     .x = make_axis("x", Unit::kPlain, 0, 1),
                     .y = make_axis("y", Unit::kPercent, 0, 1),
                     .dots = {{.label = "a", .x = 0.5, .y = 1, .low = low, .high = high}}});
    const size_t end = svg.find("\" class=\"whisker");
    return svg.substr(svg.rfind('<', end), end - svg.rfind('<', end));
  };
  const std::string whole = whisker(0, 1);
  EXPECT_NE(whole.find(" y1="), std::string::npos) << whole;
  EXPECT_EQ(whisker(-0.2, 1.4), whole);
}

TEST(Report, LabelsTakeTheRoomThatThereIs) {
  const auto drawn = [](const std::string& label) {
    return draw(LineChart{.title = "t",
                          .description = "",
                          .x = make_axis("x", Unit::kPlain, 0, 1),
                          .y = make_axis("y", Unit::kPlain, 0, 1),
                          .lines = {{.label = label, .points = {{0, 0, 0, 0}, {1, 1, 1, 1}}}}});
  };
  EXPECT_NE(drawn("mha with a long window").find(">mha with a long window<"), std::string::npos);
  EXPECT_NE(drawn("retention with a very long name").find(">retention w…y long name<"),
            std::string::npos);
}

TEST(Report, FiftyRunsStaySmall) {
  const Comparison c = swept();
  EXPECT_GE(c.runs.size(), 50u);
  EXPECT_LT(to_html(c).size(), 3u << 20);
}

TEST(Report, CountsWhatATaskTrainsOn) {
  Comparison c = quickstart();
  for (TaskInfo& task : c.tasks) task.unit = "images";
  for (const std::string& shown : {to_html(c), to_text(c)}) {
    EXPECT_NE(shown.find("images/s"), std::string::npos);
    EXPECT_EQ(shown.find("tokens/s"), std::string::npos);
  }
  EXPECT_NE(to_html(c).find("against training images on"), std::string::npos);
  EXPECT_NE(to_json(c).find(R"("unit": "images")"), std::string::npos);
}

TEST(Report, TextTableIsAligned) {
  const std::string text = to_text(pages().at("quickstart"));
  std::istringstream lines(text);
  std::string line, previous;
  int tables = 0;
  while (std::getline(lines, line)) {
    if (line.starts_with("─")) {
      ++tables;
      // Every row ends with a right-aligned column, so all are as wide as the rule.
      const auto columns = [](const std::string& s) {
        return std::count_if(s.begin(), s.end(), [](char c) { return (c & 0xC0) != 0x80; });
      };
      const auto width = columns(line);
      EXPECT_EQ(columns(previous), width);
      for (int row = 0; row < 5; ++row) {
        ASSERT_TRUE(std::getline(lines, previous));
        EXPECT_EQ(columns(previous), width) << previous;
      }
    }
    previous = line;
  }
  EXPECT_EQ(tables, 2);
  EXPECT_NE(text.find("no difference found"), std::string::npos);
}

TEST(Report, JsonHasNoNan) {
  const std::string json = to_json(pages().at("failed"));
  EXPECT_EQ(json.find(": nan"), std::string::npos);
  EXPECT_EQ(json.find(": inf"), std::string::npos);
  EXPECT_NE(json.find("\"problem\": \"diverged at step 600"), std::string::npos);
  EXPECT_NE(json.find("\"relation\": \"better\""), std::string::npos);
}

}  // namespace
}  // namespace headloom::report::pages_test
