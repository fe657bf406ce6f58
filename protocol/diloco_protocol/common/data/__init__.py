"""What files of training data are, by their names and beginnings: for the learner that reads them and for `validate`.

Text and names come in, words and decisions go out; ``local_files`` alone looks at folders. No library of data sets.
"""
