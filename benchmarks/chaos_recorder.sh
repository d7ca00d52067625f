# What a run of the chaos check executes: it appends one line at its start and one at its end to a file that all share.
#
#   sh chaos_recorder.sh FILE CODES SECONDS MODE
#
# CODES are exit codes by attempt number ("4 4 0"; the last one stands for all that follow). MODE is a word: `say` prints
# a line, `stubborn` does not hear TERM. Built-in commands only, but for `sleep`; one write of one short line with
# O_APPEND is whole, so the order of the lines is the order of the writes. Times are seconds since boot.
file=$1 seconds=$3 mode=$4
[ "$mode" = stubborn ] && trap '' TERM
read -r now rest </proc/uptime
number=${QL3_ATTEMPT:-1}
for code in $2; do
  [ "$number" -le 1 ] && break
  number=$((number - 1))
done
echo "start $QL3_ATTEMPT_ID $QL3_RUN_ID $$ $code $now" >>"$file"
[ "$mode" = say ] && echo "$QL3_ATTEMPT_ID"
[ "$seconds" = 0 ] || sleep "$seconds"
read -r now rest </proc/uptime
echo "end $QL3_ATTEMPT_ID $code $now" >>"$file"
exit "$code"
