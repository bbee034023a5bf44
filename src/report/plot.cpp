#include "report/plot.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

#include "core/hash.h"
#include "core/text.h"
#include "report/format.h"

namespace headloom::report {
namespace {

// Drawing units; the page scales them to about one CSS pixel.
constexpr double kWidth = 480, kHeight = 300;
constexpr double kLeft = 52, kTop = 14, kBottom = 42;
constexpr double kLabelGap = 15;  // between the baselines of two end labels
// The width of a character of a label where the page is narrow, of one of a floor's name, and of a
// line's leader to its label.
constexpr double kLabelCharacter = 8.4, kNoteCharacter = 6, kLeader = 17;

std::string num(double value) {
  std::string text = fixed(value, 1);
  if (text.ends_with(".0")) text.resize(text.size() - 2);
  return text;
}

std::string text_at(double x, double y, const std::string& css, const std::string& content,
                    const std::string& more = "") {
  return str("<text x=\"", num(x), "\" y=\"", num(y), "\" class=\"", css, "\"", more, ">",
             escape(content), "</text>");
}

std::string line_at(double x1, double y1, double x2, double y2, const std::string& css) {
  return str("<line x1=\"", num(x1), "\" y1=\"", num(y1), "\" x2=\"", num(x2), "\" y2=\"", num(y2),
             "\" class=\"", css, "\"/>");
}

std::string cross_at(double x, double y, const std::string& css) {
  return str("<path d=\"M", num(x - 4), " ", num(y - 4), "l8 8m0 -8l-8 8\" class=\"cross ", css,
             "\"/>");
}

std::string series(int style) { return str("s", style); }

// Steps of 1, 2 or 5 times a power of ten, about `wanted` of them.
double nice_step(double span, int wanted) {
  const double raw = span / wanted;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  for (const double m : {1.0, 2.0, 5.0}) {
    if (m * power >= raw * 0.999) return m * power;
  }
  return 10 * power;
}

// The area of the data inside the drawing.
struct Frame {
  double left = kLeft, right = kWidth - 14, top = kTop, bottom = kHeight - kBottom;
  const Axis& x;
  const Axis& y;
  double px(double v) const { return left + x.at(v) * (right - left); }
  double py(double v) const { return bottom - y.at(v) * (bottom - top); }
};

std::string open_svg(const std::string& title, const std::string& description,
                     const std::string& id, bool many = false) {
  return str("<svg class=\"chart", many ? " many" : "", "\" viewBox=\"0 0 ", num(kWidth), " ",
             num(kHeight),
             "\" xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" aria-labelledby=\"", id, "t ",
             id, "d\"><title id=\"", id, "t\">", escape(title), "</title><desc id=\"", id, "d\">",
             escape(description), "</desc>");
}

// Unique in a page for different titles, and the same in every writing of the page.
std::string id_of(const std::string& title) { return "c" + hash_text(title) + "-"; }

std::string grid(const Frame& f) {
  std::string out;
  for (const double v : f.y.ticks()) {
    out += line_at(f.left, f.py(v), f.right, f.py(v), "grid");
    out += text_at(f.left - 7, f.py(v) + 4, "tick end", f.y.tick_text(v));
  }
  double last_x = -1e9;
  for (const double v : f.x.ticks()) {
    const double x = f.px(v);
    out += line_at(x, f.bottom, x, f.bottom + 4, "axis");
    const std::string label = f.x.tick_text(v);
    const double half = 3.4 * static_cast<double>(display_width(label));
    if (x - half < last_x + 6) continue;
    out += text_at(x, f.bottom + 17, "tick mid", label);
    last_x = x + half;
  }
  out += line_at(f.left, f.bottom, f.right, f.bottom, "axis");
  out += text_at((f.left + f.right) / 2, f.bottom + 35, "name mid", f.x.label);
  return out;
}

// Moves label positions apart to at least `gap` within [low, high], keeping their order.
std::vector<double> spread_labels(const std::vector<double>& wanted, double gap, double low,
                                  double high) {
  std::vector<size_t> order(wanted.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return wanted[a] < wanted[b]; });
  std::vector<double> out(wanted.size());
  double edge = low;
  for (const size_t i : order) {
    out[i] = std::max(wanted[i], edge);
    edge = out[i] + gap;
  }
  double limit = high;
  for (auto it = order.rbegin(); it != order.rend(); ++it) {
    out[*it] = std::min(out[*it], limit);
    limit = out[*it] - gap;
  }
  return out;
}

bool is_share(Unit unit) { return unit == Unit::kPercent || unit == Unit::kPoints; }

// "1.934", "87.5%": a value of the axis, with the digits by which neighbours differ.
std::string value_text(const Axis& axis, double value) {
  if (!axis.names.empty()) return axis.tick_text(value);
  if (axis.unit == Unit::kSeconds) return duration(value);
  if (axis.unit == Unit::kCount) return count(value);
  if (axis.log || !axis.places.empty()) return formatted("%.4g", value);
  const bool share = is_share(axis.unit);
  const double scale = share ? 100 : 1;
  const double span = scale * (axis.high - axis.low);
  const int decimals =
      std::clamp(static_cast<int>(std::ceil(2.5 - std::log10(span))), share ? 1 : 0, 6);
  return (value < 0 ? "−" : "") + fixed(std::abs(scale * value), decimals) +
         (axis.unit == Unit::kPercent  ? "%"
          : axis.unit == Unit::kPoints ? " points"
                                       : "");
}

// "2.40M training tokens", "lr 0.004".
std::string place_text(const Axis& axis, double value) {
  const std::string text = value_text(axis, value);
  if (axis.unit == Unit::kSeconds) return text;
  return axis.unit == Unit::kCount ? text + " " + axis.label : axis.label + " " + text;
}

// What is read at a place of the drawing.
struct Reading {
  double x = 0, y = 0;
  int style = 0;
  std::string text;
};

// The drawing with its readings, a group of them for each line.
std::string with_readings(const std::string& svg, const std::string& id, const std::string& title,
                          const std::vector<std::vector<Reading>>& groups) {
  std::string out = "<div class=\"plot\" role=\"group\" aria-label=\"" +
                    escape("The values of: " + title) + "\">" + svg;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const Reading& r : groups[g]) {
      // Texts stand on the side of the point where there is room.
      out += str("<input type=\"radio\" name=\"", id, g, "\" class=\"", series(r.style),
                 r.x > kWidth / 2 ? " left" : "", "\" style=\"left:", num(100 * r.x / kWidth),
                 "%;top:", num(100 * r.y / kHeight), "%\" aria-label=\"", escape(r.text), "\"/>");
    }
  }
  return out + "</div>";
}

// Along a line: few enough to keep the page small.
std::vector<Reading> readings_of(const Line& line, const Frame& f) {
  std::vector<Reading> out;
  const size_t stride = line.points.size() / 40 + 1;
  const size_t first = line.points.empty() ? 0 : (line.points.size() - 1) % stride;
  for (size_t i = first; i < line.points.size(); i += stride) {
    const LinePoint& p = line.points[i];
    if (p.y > f.y.high || p.y < f.y.low) continue;
    std::string text = p.note;
    if (text.empty()) {
      text = line.label + ": " + value_text(f.y, p.y);
      if (p.high > p.low) {
        text += " (" + value_text(f.y, p.low) + " to " + value_text(f.y, p.high) + ")";
      }
      text += " at " + place_text(f.x, p.x);
    }
    out.push_back({f.px(p.x), f.py(p.y), line.style, std::move(text)});
  }
  return out;
}

// What lies outside the frame is clipped; a small arrow says where a line goes on, or where its
// band reaches farthest if the line itself stays within.
std::string draw_clipped(const Line& line, const Frame& f, std::vector<Reading>& readings) {
  std::string out;
  for (const int direction : {1, -1}) {  // above, below
    const auto outside = [&](const LinePoint& p) {
      return direction > 0 ? p.y > f.y.high : p.y < f.y.low;
    };
    const double y = direction > 0 ? f.top + 3 : f.bottom - 3;
    const auto mark = [&](const LinePoint& p, const std::string& begins, const char* preposition,
                          double at) {
      out += str("<path class=\"arrow ", series(line.style), "\" d=\"M", num(f.px(p.x) - 4), " ",
                 num(y), "l4 ", -7 * direction, "l4 ", 7 * direction, "Z\"/>");
      return Reading{f.px(p.x), y, line.style,
                     str(begins, direction > 0 ? "above" : "below", " the figure, ", preposition,
                         value_text(f.y, at))};
    };
    if (std::none_of(line.points.begin(), line.points.end(), outside)) {
      const auto end = [&](const LinePoint& p) { return direction > 0 ? p.high : p.low; };
      const auto most = std::max_element(
          line.points.begin(), line.points.end(),
          [&](const auto& a, const auto& b) { return direction * end(a) < direction * end(b); });
      const bool cut = direction > 0 ? end(*most) > f.y.high : end(*most) < f.y.low;
      if (cut && most->high > most->low && !line.broken) {
        readings.push_back(
            mark(*most, "the band of " + line.label + " reaches ", "to ", end(*most)));
      }
      continue;
    }
    // It may come from there, and it may go there later.
    const auto within = std::find_if_not(line.points.begin(), line.points.end(), outside);
    if (within != line.points.begin()) {
      readings.insert(readings.begin(),
                      mark(*(within - 1), line.label + " begins ", "at ", line.points.front().y));
    }
    const auto last =
        std::find_if(line.points.rbegin(), std::make_reverse_iterator(within), outside);
    if (last == std::make_reverse_iterator(within)) continue;
    const auto most = std::max_element(
        within, line.points.end(),
        [&](const auto& a, const auto& b) { return direction * a.y < direction * b.y; });
    readings.push_back(mark(*last, line.label + " goes ", "to ", most->y));
  }
  return out;
}

std::string draw_mark(const Mark& mark, const Frame& f) {
  const double x = f.px(mark.x), y = f.py(mark.y);
  const std::string css = "mark " + series(mark.style);
  if (mark.edge) {
    return str("<rect class=\"", css, "\" x=\"", num(x - 6), "\" y=\"", num(y - 6),
               "\" width=\"12\" height=\"12\"/>");
  }
  return str("<circle class=\"", css, "\" r=\"6.5\" cx=\"", num(x), "\" cy=\"", num(y), "\"/>");
}

// A label of which as much is left as `width` has room for, of its beginning and of its end: names
// of variants often differ at the end alone.
std::string shortened(const std::string& label, double width, double character = kLabelCharacter) {
  const auto columns = static_cast<size_t>(width / character);
  if (display_width(label) <= columns) return label;
  std::vector<std::string> characters;
  for (const char c : label) {
    if ((c & 0xC0) != 0x80 || characters.empty()) characters.emplace_back();
    characters.back() += c;
  }
  std::string begin, end;
  for (size_t i = 0; i < characters.size(); ++i) {
    const bool front = i % 2 == 0;
    const std::string& next = characters[front ? i / 2 : characters.size() - 1 - i / 2];
    if (display_width(begin + next + end) >= columns) break;
    if (front) {
      begin += next;
    } else {
      end.insert(0, next);
    }
  }
  return begin + "…" + end;
}

std::string draw_levels(const std::vector<Level>& levels, const Frame& f) {
  std::string out;
  std::vector<const Level*> named;
  std::vector<double> wanted;
  for (const Level& level : levels) {
    if (!(level.y > f.y.low && level.y <= f.y.high)) continue;
    const double y = f.py(level.y);
    out += line_at(f.left, y, f.right, y, "floor");
    if (level.name.empty()) continue;
    named.push_back(&level);
    wanted.push_back(y < f.top + 12 ? y + 12 : y - 4);
  }
  const std::vector<double> places = spread_labels(wanted, 13, f.top + 8, f.bottom - 4);
  for (size_t i = 0; i < named.size(); ++i) {
    const double room = f.right - f.left - 8;
    out += text_at(f.left + 4, places[i], "note", shortened(named[i]->name, room, kNoteCharacter));
  }
  return out;
}

// Named at their beginnings: the other ends belong to the labels of the lines.
std::string draw_floors(const std::vector<Line>& floors, const Frame& f) {
  std::vector<double> wanted;
  for (const Line& floor : floors) wanted.push_back(f.py(floor.points.front().y) - 4);
  const std::vector<double> places = spread_labels(wanted, 13, f.top + 8, f.bottom - 4);
  std::string out;
  for (size_t i = 0; i < floors.size(); ++i) {
    std::string path;
    for (const LinePoint& p : floors[i].points) {
      path += str(path.empty() ? "M" : "L", num(f.px(p.x)), " ", num(f.py(p.y)));
    }
    out += "<path class=\"floor\" d=\"" + path + "\"/>";
    out += text_at(f.px(floors[i].points.front().x) + 8, places[i], "note", floors[i].label);
  }
  return out;
}

std::string draw_line(const Line& line, const Frame& f) {
  std::string path, band, band_back;
  bool wide = false;
  for (const LinePoint& p : line.points) {
    const std::string x = num(f.px(p.x));
    path += str(path.empty() ? "M" : "L", x, " ", num(f.py(p.y)));
    band += str(band.empty() ? "M" : "L", x, " ", num(f.py(p.low)));
    band_back = str("L", x, " ", num(f.py(p.high)), band_back);
    wide |= p.high > p.low;
  }
  const std::string css = series(line.style);
  std::string out;
  if (wide && !line.broken && !line.dotted) {
    out += "<path class=\"band " + css + "\" d=\"" + band + band_back + "Z\"/>";
  }
  out += "<path class=\"line " + css +
         (line.broken   ? " broken"
          : line.dotted ? " thin"
                        : "") +
         "\" d=\"" + path + "\"/>";
  for (const LinePoint& p : line.points) {
    if (!line.dotted && line.points.size() > 1) break;
    const double x = f.px(p.x);
    if (p.high > p.low) out += line_at(x, f.py(p.low), x, f.py(p.high), "whisker " + css);
    out += str("<circle class=\"dot ", css, "\" r=\"3\" cx=\"", num(x), "\" cy=\"", num(f.py(p.y)),
               "\"/>");
  }
  return out;
}

double label_room(const std::vector<Line>& lines) {
  size_t longest = 0;
  for (const Line& line : lines) longest = std::max(longest, display_width(line.label));
  return std::min(0.45 * kWidth, kLeader + 7 + kLabelCharacter * static_cast<double>(longest));
}

double radius_of(const Dot& dot) {
  if (!std::isfinite(dot.size)) return 4.5;
  return std::max(3.0, 13 * std::sqrt(std::clamp(dot.size, 0.0, 1.0)));
}

struct Box {
  double left, top, right, bottom;
  double overlap(const Box& other) const {
    const double w = std::min(right, other.right) - std::max(left, other.left);
    const double h = std::min(bottom, other.bottom) - std::max(top, other.top);
    return w > 0 && h > 0 ? w * h : 0;
  }
};

struct LabelPlace {
  Box box;
  bool to_left = false;  // of the dot it names
  bool far = false;      // from it, so that a line leads there
};

// Where near a dot its label covers least of what is already drawn. Near places come first.
LabelPlace free_place(double x, double y, double radius, double width, const Frame& f,
                      const std::vector<Box>& taken) {
  constexpr double kHeightOfLabel = 17, kPriceOfDistance = 0.6;
  const double h = kHeightOfLabel;
  LabelPlace best{};
  double least = kUnknown;
  for (const double up :
       {0.0, 0.75, -0.75, 1.5, -1.5, 2.5, -2.5, 3.5, -3.5, 4.5, -4.5, 5.5, -5.5}) {
    const double d = (std::abs(up) < 0.5 ? 1 : 0.75) * (radius + 4);
    const double top = y - up * h - h / 2;
    for (const bool to_left : {false, true}) {
      const double left = to_left ? x - d - width : x + d;
      const Box box{left, top, left + width, top + h};
      double cost = kPriceOfDistance * std::abs(up) * h;
      for (const Box& other : taken) cost += box.overlap(other);
      cost += 20 * (std::max(0.0, f.left - box.left) + std::max(0.0, box.right - f.right - 10));
      cost += 20 * (std::max(0.0, f.top - box.top) + std::max(0.0, box.bottom - f.bottom));
      if (cost >= least) continue;
      least = cost;
      best = {box, to_left, std::abs(up) > 1};
    }
  }
  return best;
}

// The labels of the lines at their ends, moved apart, with a leader from each end to its label.
std::string draw_end_labels(const std::vector<const Line*>& drawn, const Frame& f) {
  std::vector<double> ends;
  for (const Line* line : drawn) {
    ends.push_back(std::clamp(f.py(line->points.back().y), f.top, f.bottom));
  }
  const double count = std::max<double>(1, static_cast<double>(ends.size()));
  const double gap = std::min(kLabelGap, (kHeight - 14) / count);
  // Labels reach down beside the numbers of the axis only where they need more than the frame.
  const bool fit = gap * (count - 1) <= f.bottom - f.top;
  const std::vector<double> places = spread_labels(ends, gap, f.top, fit ? f.bottom : kHeight - 8);
  std::string out;
  for (size_t i = 0; i < drawn.size(); ++i) {
    const double x = std::min(f.px(drawn[i]->points.back().x), f.right);
    const std::string css = series(drawn[i]->style);
    if (drawn[i]->broken) out += cross_at(x, ends[i], css);
    // A leader through the figure would look like a line.
    if (drawn[i]->dotted && x < f.right - 60) {
      out +=
          text_at(x + 8, ends[i] + 4, "label " + css, shortened(drawn[i]->label, kWidth - x - 8));
      continue;
    }
    out += str("<path class=\"leader ", css, "\" d=\"M", num(x + 3), " ", num(ends[i]), "L",
               num(f.right + 8), " ", num(places[i]), "h5\"/>");
    out += text_at(f.right + kLeader, places[i] + 4, "label " + css,
                   shortened(drawn[i]->label, kWidth - f.right - kLeader));
  }
  return out;
}

}  // namespace

std::vector<double> Axis::ticks() const {
  std::vector<double> out;
  for (size_t i = 0; i < names.size(); ++i) out.push_back(static_cast<double>(i));
  if (!places.empty()) return places;
  if (!names.empty() || !(high > low)) return out;
  if (log) {
    const bool few = high / low < 1000;
    const auto first = std::lround(std::floor(std::log10(low))),
               last = std::lround(std::log10(high));
    for (long exponent = first; exponent <= last; ++exponent) {
      const double power = std::pow(10, static_cast<double>(exponent));
      for (const double m : {1.0, 2.0, 5.0}) {
        if (m > 1 && !few) break;
        const double v = m * power;
        if (v >= low * 0.9999 && v <= high * 1.0001) out.push_back(v);
      }
    }
    if (out.size() > 1) return out;
    out.clear();  // a range so short has numbers at equal distances
  }
  double step = nice_step(high - low, 5);
  if (unit == Unit::kSeconds && high > 60) {
    for (const double s : {15., 30., 60., 120., 300., 600., 1800., 3600., 7200., 21600., 86400.}) {
      step = s;
      if (s >= (high - low) / 6) break;
    }
    step = std::max(step, nice_step(high - low, 8));
  }
  const double first = std::ceil(low / step - 1e-9);
  for (int i = 0; i < 12 && (first + i) * step <= high + 1e-9 * step; ++i) {
    const double v = (first + i) * step;
    // Room beyond what a share can be has no number.
    if (unit == Unit::kPercent && (v < -1e-9 || v > 1 + 1e-9)) continue;
    out.push_back(v);
  }
  return out;
}

// Decimals that tell ticks at this distance apart.
static int decimals_of(double step) {
  return std::clamp(static_cast<int>(std::ceil(-std::log10(step) - 1e-9)), 0, 6);
}

std::string Axis::tick_text(double value) const {
  if (!names.empty()) return names[static_cast<size_t>(value)];
  if (!places.empty()) return formatted("%.6g", value);
  if (std::abs(value) < 1e-12 * (high - low)) value = 0;
  if (unit == Unit::kCount) return value == 0 ? "0" : count(value);
  if (unit == Unit::kSeconds) {
    if (value == 0) return "0";
    if (high <= 60) return fixed(value, decimals_of(nice_step(high - low, 5))) + "s";
    const auto seconds = static_cast<int64_t>(std::lround(value));
    if (seconds >= 3600) {
      return str(seconds / 3600, "h") + (seconds % 3600 ? str(seconds % 3600 / 60, "m") : "");
    }
    return (seconds >= 60 ? str(seconds / 60, "m") : "") +
           (seconds % 60 ? str(seconds % 60, "s") : "");
  }
  const double scale = is_share(unit) ? 100 : 1;
  const double shown = value * scale;
  int decimals = 0;
  if (log) {
    decimals = shown > 0 ? std::max(0, static_cast<int>(std::ceil(-std::log10(shown) - 1e-9))) : 0;
  } else {
    decimals = decimals_of(nice_step((high - low) * scale, 5));
  }
  const std::string sign = shown < 0 ? "−" : "";
  return sign + fixed(std::abs(shown), std::min(decimals, 6)) +
         (unit == Unit::kPercent  ? "%"
          : unit == Unit::kPoints ? " pts"
                                  : "");
}

double Axis::at(double value) const {
  if (!(high > low)) return 0.5;
  // Values far outside stay drawable; the frame clips them.
  const double where = log ? std::log(std::max(value, low * 1e-3) / low) / std::log(high / low)
                           : (value - low) / (high - low);
  return std::clamp(where, -3.0, 4.0);
}

Axis make_axis(std::string label, Unit unit, double low, double high, bool log) {
  Axis axis{std::move(label), unit, log && low > 0, low, high};
  if (!std::isfinite(low) || !std::isfinite(high) || high < low) {
    axis.log = false;
    axis.low = 0;
    axis.high = 1;
  } else if (high - low <= 1e-12 * std::max(std::abs(high), std::abs(low))) {
    // Around zero a hundredth: a percentage point of shares, little of a loss.
    const double margin = high == 0 ? 0.01 : std::abs(high) * 0.1;
    axis.log = false;
    axis.low = low - margin;
    axis.high = high + margin;
  }
  return axis;
}

std::string draw(const LineChart& chart) {
  if (chart.marks.empty() && std::all_of(chart.lines.begin(), chart.lines.end(),
                                         [](const Line& line) { return line.points.empty(); })) {
    return "";
  }
  const std::string id = id_of(chart.title);
  Frame f{.x = chart.x, .y = chart.y};
  f.right = kWidth - label_room(chart.lines);
  std::string out = open_svg(chart.title, chart.description, id, chart.lines.size() > 6);
  out += str("<clipPath id=\"", id, "c\"><rect x=\"", num(f.left), "\" y=\"", num(f.top - 6),
             "\" width=\"", num(f.right - f.left + 4), "\" height=\"", num(f.bottom - f.top + 6),
             "\"/></clipPath>");
  out += grid(f);
  out += draw_levels(chart.levels, f);
  out += draw_floors(chart.floors, f);
  out += str("<g clip-path=\"url(#", id, "c)\">");
  std::vector<const Line*> drawn;
  // The first line (the best) is drawn last, above the others.
  for (auto it = chart.lines.rbegin(); it != chart.lines.rend(); ++it) {
    if (it->points.empty()) continue;
    out += draw_line(*it, f);
    drawn.push_back(&*it);
  }
  out += "</g>";
  std::vector<std::vector<Reading>> readings;
  for (const Line* line : drawn) {
    readings.push_back(readings_of(*line, f));
    out += draw_clipped(*line, f, readings.back());
  }
  readings.emplace_back();
  for (const Mark& mark : chart.marks) {
    out += draw_mark(mark, f);
    readings.back().push_back({f.px(mark.x), f.py(mark.y), mark.style, mark.note});
  }
  out += draw_end_labels(drawn, f);
  return with_readings(out + "</svg>", id, chart.title, readings);
}

std::string draw(const Scatter& scatter) {
  if (scatter.dots.empty()) return "";
  const std::string id = id_of(scatter.title);
  Frame f{.x = scatter.x, .y = scatter.y};
  std::string out = open_svg(scatter.title, scatter.description, id) + grid(f);
  out += draw_levels(scatter.levels, f);
  std::vector<Box> taken;
  std::vector<Reading> readings;
  // The interval of a share can reach past what a share can be, and past the axis.
  const auto within = [&](double value) { return std::clamp(f.py(value), f.top, f.bottom); };
  for (const Dot& dot : scatter.dots) {
    const double r = radius_of(dot), x = f.px(dot.x), y = f.py(dot.y);
    taken.push_back({x - r, y - r, x + r, y + r});
    taken.push_back({x - 1.5, within(dot.high), x + 1.5, within(dot.low)});
    if (dot.x_high > dot.x_low) {
      taken.push_back({f.px(dot.x_low), y - 1.5, f.px(dot.x_high), y + 1.5});
    }
  }
  for (const Dot& dot : scatter.dots) {
    const std::string css = series(dot.style);
    const double x = f.px(dot.x), y = f.py(dot.y);
    const double radius = radius_of(dot);
    readings.push_back({x, y, dot.style, dot.note});
    out += line_at(x, within(dot.low), x, within(dot.high), "whisker " + css);
    if (dot.x_high > dot.x_low) {
      out += line_at(f.px(dot.x_low), y, f.px(dot.x_high), y, "whisker " + css);
    }
    out += str("<circle class=\"", std::isfinite(dot.size) ? "bubble " : "ring ", css, "\" r=\"",
               num(radius), "\" cx=\"", num(x), "\" cy=\"", num(y), "\"/>");
    out +=
        str("<circle class=\"dot ", css, "\" r=\"2.5\" cx=\"", num(x), "\" cy=\"", num(y), "\"/>");
    const std::string label = shortened(dot.label, (f.right - f.left) / 2);
    const auto [box, to_left, far] =
        free_place(x, y, radius, 9.6 * static_cast<double>(display_width(label)), f, taken);
    taken.push_back(box);
    const double end = to_left ? box.right : box.left;
    if (far) out += line_at(x, y, end, (box.top + box.bottom) / 2, "leader " + css);
    out += text_at(end, box.bottom - 4, (to_left ? "label end " : "label ") + css, label);
  }
  return with_readings(out + "</svg>", id, scatter.title, {readings});
}

std::string draw(const Strip& strip) {
  constexpr double kStripWidth = 150, kStripHeight = 22, kMargin = 7;
  const Axis axis = make_axis("", Unit::kPlain, strip.low, strip.high);
  const auto px = [&](double v) { return kMargin + axis.at(v) * (kStripWidth - 2 * kMargin); };
  const std::string css = series(strip.style);
  std::string out =
      str("<svg class=\"strip\" viewBox=\"0 0 ", num(kStripWidth), " ", num(kStripHeight),
          "\" xmlns=\"http://www.w3.org/2000/svg\" role=\"img\"><title>", escape(strip.title),
          "</title>");
  if (std::isfinite(strip.reference)) {
    out += line_at(px(strip.reference), 0, px(strip.reference), kStripHeight, "reference");
  }
  const double y = kStripHeight / 2;
  if (std::isfinite(strip.mean) && std::isfinite(strip.half_width)) {
    out += str("<rect class=\"spread ", css, "\" x=\"", num(px(strip.mean - strip.half_width)),
               "\" y=\"", num(y - 4.5), "\" width=\"",
               num(px(strip.mean + strip.half_width) - px(strip.mean - strip.half_width)),
               "\" height=\"9\" rx=\"2\"/>");
  }
  for (const double v : strip.values) {
    if (!std::isfinite(v)) continue;
    out += str("<circle class=\"seed ", css, "\" r=\"2.6\" cx=\"", num(px(v)), "\" cy=\"", num(y),
               "\"/>");
  }
  if (std::isfinite(strip.mean)) {
    out += line_at(px(strip.mean), y - 7, px(strip.mean), y + 7, "mean " + css);
  }
  return out + "</svg>";
}

}  // namespace headloom::report
