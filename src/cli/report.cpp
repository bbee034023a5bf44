#include <cstdio>
#include <filesystem>

#include "cli/arguments.h"
#include "cli/command.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/files.h"
#include "core/shell.h"
#include "report/format.h"
#include "serve/page_server.h"
#include "train/interrupt.h"
#include "train/run_folder.h"
#include "train/run_places.h"
#include "train/run_report.h"

namespace headloom::cli {
namespace {

namespace fs = std::filesystem;

constexpr int kPort = 8081;

struct ReportArguments {
  std::vector<std::string> folders;
  std::string out;
  bool watch = false, json = false;
  std::optional<int> port;
};

report::Comparison report_now(const RunReport& runs, const ReportArguments& a) {
  report::Comparison out = runs.read();
  // By its plain name: a page that is passed on has no path of this machine.
  out.command = "headloom report";
  for (const std::string& folder : a.folders) out.command += " " + shell_word(folder);
  out.date = today();
  return out;
}

// When each file was last written; a file that is not there has the earliest time.
std::vector<fs::file_time_type> written_at(const std::vector<std::string>& files) {
  std::vector<fs::file_time_type> out;
  for (const std::string& file : files) {
    std::error_code error;
    const auto time = fs::last_write_time(file, error);
    out.push_back(error ? fs::file_time_type::min() : time);
  }
  return out;
}

// Calls f with each run of a report.
template <typename F>
void each_run(report::Comparison& shown, const F& f) {
  for (report::Run& run : shown.runs) f(run);
  for (report::Comparison& again : shown.robustness) {
    for (report::Run& run : again.runs) f(run);
  }
}

int watch(RunReport& runs, const ReportArguments& a) {
  std::string page;
  std::vector<fs::file_time_type> as_of;
  std::vector<bool> worked_on;
  std::vector<std::string> begun = begun_runs(a.folders);
  std::vector<fs::file_time_type> configured = written_at(runs.configurations());
  const auto current = [&] {
    const auto now = written_at(runs.files());
    // A run may be resumed with other settings, or trained anew.
    bool anew = written_at(runs.configurations()) != configured;
    // A comparison that is still running starts new runs.
    std::vector<std::string> present = begun;
    try {
      present = begun_runs(a.folders);
    } catch (const Error&) {  // making the page meets it again and says so
    }
    anew |= present != begun;
    const std::vector<bool> at_work = runs.worked_on();
    if (page.empty() || now != as_of || at_work != worked_on || anew) {
      as_of = now;
      worked_on = at_work;
      try {
        if (anew) runs = RunReport(a.folders);
        begun = present;
        configured = written_at(runs.configurations());
        report::Comparison shown = report_now(runs, a);
        // The page is served alone, so that a link to a run's folder would lead nowhere.
        each_run(shown, [](report::Run& run) { run.folder.clear(); });
        page = report::to_html(shown);
      } catch (const Error& error) {
        // For example, a comparison has moved the run away for a while. The page asks again.
        as_of.clear();
        page =
            str("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
                "<title>Headloom</title></head><body><p>",
                report::escape(error.what()), "</p></body></html>\n");
      }
      // The browser asks again by itself, and keeps its place.
      page.insert(page.find("<head>") + 6, "<meta http-equiv=\"refresh\" content=\"10\">");
    }
    return page;
  };
  install_interrupt_handler();
  serve::PageServer server(a.port.value_or(kPort), current);
  std::printf("the report is at http://127.0.0.1:%d/ until Ctrl-C\n", server.port());
  std::fflush(stdout);
  server.run([] { return interrupted(); });
  return 0;
}

int run_report(ReportArguments& a) {
  if (a.port && !a.watch) usage_error("--port needs --watch.");
  if (a.json && a.watch) {
    usage_error("--watch serves a page and prints no result: leave out --json or --watch.");
  }
  if (!a.out.empty() && a.watch) {
    usage_error("--watch serves a page and writes no file: leave out --out or --watch.");
  }
  RunReport runs(a.folders);
  if (a.watch) return watch(runs, a);
  const bool asked = !a.out.empty();
  if (!asked) {
    const bool one_run = a.folders.size() == 1 && fs::exists(metrics_path(a.folders[0]));
    a.out = one_run ? a.folders[0] + "/report.html" : "report.html";
  }
  check_output_file(a.out);
  report::Comparison shown = report_now(runs, a);
  shown.command += " --out " + shell_word(a.out);
  const fs::path folder = fs::absolute(a.out).lexically_normal().parent_path();
  each_run(shown, [&](report::Run& run) {
    if (!run.folder.empty()) run.folder = fs::path(run.folder).lexically_relative(folder).string();
  });
  or_tell_of_out(asked, "file", [&] { write_file(a.out, report::to_html(shown)); });
  std::printf("%s\n", a.json ? report::to_json(shown).c_str() : report::to_text(shown).c_str());
  std::fflush(stdout);  // where both go to one place, this comes last
  std::fprintf(stderr, "report: %s\n", a.out.c_str());
  return 0;
}

}  // namespace

Command report_command() {
  return {"report", "a report of any runs, whether they are finished, under way or interrupted",
          "headloom report runs/mha runs/dcmha --out report.html",
          [](CLI::App& app) -> std::function<int()> {
            auto a = std::make_shared<ReportArguments>();
            app.add_option("RUN", a->folders,
                           "folders of runs, or of comparisons for all of their runs; the first is "
                           "the baseline")
                ->required();
            app.add_option("--out", a->out,
                           "the report's file, *.html; RUN/report.html of a single run, else "
                           "report.html")
                ->check(ends_in_html());
            app.add_flag("--watch", a->watch,
                         "serve the report on this machine alone, and renew it while runs go on");
            app.add_option("--port", a->port,
                           str("of --watch, ", kPort, " by default; 0: any that is free"))
                ->check(whole_number(0, 65535));
            app.add_flag("--json", a->json, "print the result as JSON");
            return [a] { return run_report(*a); };
          }};
}

}  // namespace headloom::cli
