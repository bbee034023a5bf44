// Charts as inline SVG, with the values to read laid over them. Colours and dashes are CSS classes
// s0, s1, ... of report/style.cpp (s0: the baseline), so one drawing serves light, dark and print;
// every line is labelled at its end.
//
// A value to read is a radio button without an appearance of its own. The buttons of a line are one
// group, so that Tab goes from line to line and the arrow keys along a line. Its name is the text
// that style.cpp shows while the button has the focus or the pointer. Nothing of this takes a
// script.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "report/comparison.h"

namespace headloom::report {

// kPoints: percentage points, for the difference of two shares; 0.03 is shown as "3 points".
enum class Unit { kPlain, kPercent, kPoints, kCount, kSeconds };

struct Axis {
  std::string label;
  Unit unit = Unit::kPlain;
  bool log = false;
  double low = 0, high = 1;
  std::vector<std::string> names{};  // of the values 0, 1, ...; empty for numbers
  std::vector<double> places{};      // of the ticks; empty: round numbers
  // Tick values inside [low, high].
  std::vector<double> ticks() const;
  std::string tick_text(double value) const;
  // 0 at low, 1 at high.
  double at(double value) const;
};

// Widens [low, high] to where nice ticks fit; handles an empty or single-valued range.
Axis make_axis(std::string label, Unit unit, double low, double high, bool log = false);

struct LinePoint {
  double x = 0, y = 0;
  double low = 0, high = 0;  // of the band
  std::string note{};        // what is read there; empty: the values by the axes
};

struct Line {
  std::string label;
  int style = 0;                    // CSS class s<style>
  bool broken = false;              // a failed run: thin, a cross at its end
  std::vector<LinePoint> points{};  // finite
  bool dotted = false;              // points with whiskers in place of a band
};

// From the lowest to the highest of what an axis shows. What is not a number is left out.
struct Extent {
  double low = kUnknown, high = kUnknown;

  void add(double value) { add(value, value); }
  void add(double from, double to) {
    low = std::fmin(low, from);
    high = std::fmax(high, to);
  }
  // Points with their bands or whiskers.
  void add(const std::vector<Line>& lines) {
    for (const Line& line : lines) {
      for (const LinePoint& p : line.points) add(p.low, p.high);
    }
  }
  bool empty() const { return std::isnan(low); }
  double size() const { return high - low; }
  // Whether the values are positive and the highest is more than `factor` times the lowest.
  bool spans(double factor) const { return low > 0 && high / low > factor; }
};

// A dotted level with its name.
struct Level {
  std::string name;
  double y = 0;
};

// A ring around a point of a line; a square where it is at an edge.
struct Mark {
  int style = 0;
  double x = 0, y = 0;
  bool edge = false;
  std::string note;  // what is read there
};

struct LineChart {
  std::string title;  // for those who do not see the chart
  std::string description;
  Axis x, y;
  std::vector<Line> lines;
  std::vector<Level> levels{};
  std::vector<Mark> marks{};
  std::vector<Line> floors{};  // levels that change along x
};
// Empty where there is nothing to draw.
std::string draw(const LineChart& chart);

struct Dot {
  std::string label;
  int style = 0;
  double x = 0, y = 0;
  double low = 0, high = 0;  // whisker in y
  double x_low = 0, x_high = 0;
  double size = kUnknown;  // area, relative to the largest; unknown: a small ring
  std::string note{};      // what is read there
};

struct Scatter {
  std::string title, description;
  Axis x, y;
  std::vector<Dot> dots;
  std::vector<Level> levels{};
};
std::string draw(const Scatter& scatter);

// One table row's seeds on a scale shared by the rows: dots, the mean with its interval, and a thin
// line at the baseline's mean.
struct Strip {
  std::string title;
  int style = 0;
  double low = 0, high = 1;
  std::vector<double> values;
  double mean = kUnknown, half_width = kUnknown;  // of the interval
  double reference = kUnknown;
};
std::string draw(const Strip& strip);

}  // namespace headloom::report
