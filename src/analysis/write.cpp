// Findings as text, JSON and a page.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "analysis/analysis.h"
#include "core/text.h"
#include "report/format.h"
#include "report/style.h"

namespace headloom::analysis {
namespace {

std::string cell_text(const Cell& cell) {
  if (const auto* text = std::get_if<std::string>(&cell)) return *text;
  if (const auto* whole = std::get_if<int64_t>(&cell)) return std::to_string(*whole);
  const double number = std::get<double>(cell);
  if (std::isnan(number)) return report::kDash;
  const double size = std::abs(number);
  return formatted(size != 0 && size < 1e-3     ? "%.2e"
                   : size >= 1e4 && size < 1e15 ? "%.0f"
                                                : "%.4g",
                   number);
}

bool is_number(const Cell& cell) { return !std::holds_alternative<std::string>(cell); }

nlohmann::ordered_json cell_json(const Cell& cell) {
  if (const auto* text = std::get_if<std::string>(&cell)) return *text;
  if (const auto* whole = std::get_if<int64_t>(&cell)) return *whole;
  const double number = std::get<double>(cell);
  return std::isfinite(number) ? nlohmann::ordered_json(number) : nlohmann::ordered_json();
}

std::string html_table(const Table& table) {
  using report::escape;
  std::string out = "<div class=\"scroll\" role=\"region\" tabindex=\"0\" aria-label=\"" +
                    escape(table.title) + "\"><table><caption>" + escape(table.title) +
                    "</caption><thead><tr>";
  for (size_t c = 0; c < table.columns.size(); ++c) {
    const bool left = table.rows.empty() || !is_number(table.rows[0][c]);
    out += str("<th scope=\"col\"", left ? " class=\"left\"" : "", ">") +
           report::rich(table.columns[c]) + "</th>";
  }
  out += "</tr></thead><tbody>\n";
  for (const auto& row : table.rows) {
    out += "<tr>";
    for (size_t c = 0; c < row.size(); ++c) {
      const bool left = !is_number(row[c]);
      const char* tag = c == 0 ? "th" : "td";
      const std::string text = cell_text(row[c]);
      // Long texts break; short ones and numbers do not.
      const std::string css = left ? text.size() > 24 ? "left wrap" : "left" : "";
      out += str("<", tag, c == 0 ? " scope=\"row\"" : "",
                 css.empty() ? "" : " class=\"" + css + "\"", ">") +
             escape(text) + "</" + tag + ">";
    }
    out += "</tr>\n";
  }
  return out + "</tbody></table></div>\n";
}

}  // namespace

std::string to_json(const Findings& findings) {
  nlohmann::ordered_json json = {{"title", findings.title}, {"found", findings.sentences}};
  json["tables"] = nlohmann::ordered_json::array();
  for (const Table& table : findings.tables) {
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const auto& row : table.rows) {
      nlohmann::ordered_json cells = nlohmann::ordered_json::array();
      for (const Cell& cell : row) cells.push_back(cell_json(cell));
      rows.push_back(std::move(cells));
    }
    json["tables"].push_back(
        {{"title", table.title}, {"columns", table.columns}, {"rows", std::move(rows)}});
  }
  return json.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::string to_text(const Findings& findings) {
  std::string out = findings.title + "\n";
  for (const Table& table : findings.tables) {
    out += "\n" + table.title + "\n";
    std::vector<size_t> widths;
    for (size_t c = 0; c < table.columns.size(); ++c) {
      size_t width = report::display_width(table.columns[c]);
      for (const auto& row : table.rows) {
        width = std::max(width, report::display_width(cell_text(row[c])));
      }
      widths.push_back(width);
    }
    const auto line = [&](const auto& text, const auto& right) {
      std::string one;
      for (size_t c = 0; c < widths.size(); ++c) {
        one += (c == 0 ? "" : "  ") + report::pad(text(c), widths[c], right(c));
      }
      while (!one.empty() && one.back() == ' ') one.pop_back();
      out += one + "\n";
    };
    line([&](size_t c) { return table.columns[c]; },
         [&](size_t c) { return !table.rows.empty() && is_number(table.rows[0][c]); });
    for (const auto& row : table.rows) {
      line([&](size_t c) { return cell_text(row[c]); },
           [&](size_t c) { return is_number(row[c]); });
    }
  }
  if (!findings.sentences.empty()) out += "\n";
  for (const std::string& sentence : findings.sentences) out += sentence + "\n";
  return out;
}

std::string to_html(const Findings& findings) {
  using report::escape;
  std::string out =
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>" +
      escape(findings.title) + "</title><style>" + report::kStyle +
      "</style></head>\n<body><main><h1>" + escape(findings.title) + "</h1>\n";
  if (!findings.sentences.empty()) {
    out += "<div class=\"answer\">";
    for (const std::string& sentence : findings.sentences) {
      out += "<p>" + report::rich(sentence) + "</p>";
    }
    out += "</div>\n";
  }
  if (!findings.figures.empty()) {
    out += "<div class=\"figures\">";
    for (const Figure& figure : findings.figures) {
      out += "<figure>" + figure.drawing + "<figcaption>" + report::rich(figure.caption) +
             "</figcaption></figure>\n";
    }
    out += "</div>\n";
  }
  for (const Table& table : findings.tables) out += html_table(table);
  return out + "</main><footer></footer></body></html>\n";
}

}  // namespace headloom::analysis
