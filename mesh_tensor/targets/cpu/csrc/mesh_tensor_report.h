// What a kernel prints or asserts goes to a function that whoever loads the library gives it.
#pragma once

typedef void (*mt_reporter)(const char *report, const int64_t *numbers);

extern const char *const mt_reports[];
static mt_reporter mt_report_to;
static thread_local int64_t mt_notes[16];
static thread_local int32_t mt_noted;

extern "C" {

__attribute__((visibility("default"))) void mesh_tensor_report_to(mt_reporter reporter) { mt_report_to = reporter; }

MT_INLINE void mt_note_int64(int64_t number) {
  if (mt_noted < 16) mt_notes[mt_noted++] = number;
}
MT_INLINE void mt_note_float64(double number) { mt_note_int64(mt_bits<int64_t>(number)); }

MT_INLINE void mt_report(int32_t report) {
  mt_noted = 0;
  if (mt_report_to) mt_report_to(mt_reports[report], mt_notes);
}

}  // extern "C"
